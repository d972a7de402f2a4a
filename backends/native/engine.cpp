#include "engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kBudget = 1 << 20;  // received bytes of one lane before the others get a turn

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void ring(int bell) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(bell, &one, sizeof one);
}

}  // namespace

// Registers the calling thread as a waiter for its life. Lock held at both ends.
class Engine::Waiter {
 public:
  explicit Waiter(Engine& engine) : engine_(engine) {
    if (engine.spare_bells_.empty()) {
      const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
      if (fd < 0) throw system_error("[engine] eventfd", errno);
      engine.spare_bells_.push_back(fd);
    }
    bell = engine.spare_bells_.back();
    engine.spare_bells_.pop_back();
    engine.waiters_.push_back(bell);
  }
  ~Waiter() {
    std::erase(engine_.waiters_, bell);
    engine_.spare_bells_.push_back(bell);
    if (engine_.waiters_.empty() && engine_.async_ > 0) engine_.background_cv_.notify_one();
  }
  int bell;

 private:
  Engine& engine_;
};

Engine::Engine(int spin_us) : spin_us_(spin_us), thread_([this] { background(); }) {}

Engine::~Engine() {
  {
    Guard guard = lock();
    stop_ = true;
    background_cv_.notify_one();
    poller_.ring();
  }
  thread_.join();
  for (int bell : spare_bells_) close(bell);
}

Lane& Engine::add(std::unique_ptr<Lane> lane, Sink& sink) {
  auto entry = std::make_unique<Entry>();
  entry->lane = std::move(lane);
  entry->sink = &sink;
  Lane& added = *entry->lane;
  poller_.add(added);
  entries_.push_back(std::move(entry));
  return added;
}

void Engine::remove(Lane& lane) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry->lane.get() == &lane; });
  if (found == entries_.end()) return;
  if (!(*found)->gone) poller_.remove(lane);
  entries_.erase(found);
}

void Engine::kick() {
  if (sleepers_ > 0) poller_.ring();
}

void Engine::expect(Lane& lane, size_t bytes) {
  for (auto& entry : entries_)
    if (entry->lane.get() == &lane) entry->expected = bytes;
}

void Engine::async_begin() {
  if (++async_ == 1 && waiters_.empty()) background_cv_.notify_one();
}

void Engine::progress(Entry& entry) {
  Lane& lane = *entry.lane;
  if (!lane.is_closed()) moved_ |= lane.progress(*entry.sink, kBudget);
  if (lane.is_closed()) {
    poller_.remove(lane);
    entry.gone = true;
  } else if (lane.wants_write() != entry.write_watched) {
    entry.write_watched = !entry.write_watched;
    poller_.watch_write(lane, entry.write_watched);
  }
}

bool Engine::progress_once() {
  moved_ = false;
  check_life();
  poller_.wait(0, ready_);
  // By index: a sink may add lanes.
  for (size_t i = 0; i < entries_.size(); ++i)
    if (!entries_[i]->gone) progress(*entries_[i]);
  if (completed_) {
    completed_ = false;
    for (int bell : waiters_) ring(bell);
  }
  return moved_;
}

void Engine::check_life() {
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - life_checked_).count() < kLifeSeconds) return;
  life_checked_ = now;
  for (size_t i = 0; i < entries_.size(); ++i) entries_[i]->lane->check_life(*entries_[i]->sink);
}

bool Engine::arm() {
  bool busy = false;
  for (auto& entry : entries_)
    if (!entry->gone)
      busy |= entry->lane->arm(std::max(entry->expected, entry->sink->awaited(*entry->lane)));
  return busy;
}

void Engine::disarm() {
  for (auto& entry : entries_)
    if (!entry->gone) entry->lane->disarm();
}

void Engine::sleep(Guard& guard, int bell, double seconds) {
  if (arm()) {
    if (sleepers_ == 0) disarm();  // others who sleep rely on their lanes being armed
    return;
  }
  pollfd fds[2] = {{poller_.epoll(), POLLIN, 0}, {bell, POLLIN, 0}};
  const double longest = seconds < 0 ? kLifeSeconds : std::min(seconds, kLifeSeconds);
  const int limit = static_cast<int>(std::ceil(longest * 1e3));
  ++sleepers_;
  guard.unlock();
  poll(fds, bell < 0 ? 1 : 2, limit);
  guard.lock();
  if (--sleepers_ == 0) disarm();
  if (fds[1].revents & POLLIN) {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = read(bell, &count, sizeof count);
  }
}

bool Engine::wait(const std::function<bool()>& done, double timeout_s) {
  Guard guard = lock();
  if (done()) return true;
  Waiter waiter(*this);
  const auto start = Clock::now();
  auto active = start;
  for (;;) {
    const bool moved = progress_once();
    if (done()) return true;
    const double elapsed = seconds_since(start);
    if (timeout_s >= 0 && elapsed >= timeout_s) return false;
    if (moved) {
      active = Clock::now();
      give_way(guard);
    }
    if (moved) continue;
    if (seconds_since(active) * 1e6 < spin_us_) {
      let_others_run(guard);
      continue;
    }
    sleep(guard, waiter.bell, timeout_s < 0 ? -1 : timeout_s - elapsed);
  }
}

void Engine::background() {
  Guard guard = lock();
  for (;;) {
    background_cv_.wait(guard, [this] { return stop_ || (async_ > 0 && waiters_.empty()); });
    if (stop_) return;
    try {
      if (progress_once())
        give_way(guard);
      else
        sleep(guard, -1, -1);
    } catch (const std::exception& error) {  // nobody else would hear of it
      fail(Error(ErrorCode::internal, std::string("[engine] ") + error.what()));
    }
  }
}

void Engine::fail(const Error& error) {
  for (auto& entry : entries_)
    if (!entry->gone) entry->lane->close(error, *entry->sink);
}

// Whoever must move next may need this processor, or the lock.
void Engine::let_others_run(Guard& guard) {
  guard.unlock();
  std::this_thread::yield();
  guard.lock();
}

// A mutex that is released and locked again at once mostly stays with its thread: whoever submits
// would wait until nothing moves any more.
void Engine::give_way(Guard& guard) {
  const int waiting = wanted_;
  if (waiting == 0) return;
  guard.unlock();
  for (int now = wanted_; now >= waiting; now = wanted_) wanted_.wait(now);
  guard.lock();
}

}  // namespace phub
