#include "core.h"

#include <future>
#include <optional>
#include <utility>

namespace phub {
namespace {

constexpr size_t kLaneBudget = 256 << 10;  // received bytes before the next lane gets its turn
constexpr int kWorkSlice = 16;             // chunks of one job before the next job gets its turn

}  // namespace

void EventQueue::push(JobEvent event) {
  const std::lock_guard guard(mutex_);
  events_.push_back(std::move(event));
  arrived_.notify_one();
}

bool EventQueue::pop(JobEvent& event, double timeout_s) {
  std::unique_lock guard(mutex_);
  arrived_.wait_for(guard, std::chrono::duration<double>(timeout_s),
                    [&] { return closed_ || !events_.empty(); });
  if (events_.empty()) return false;
  event = std::move(events_.front());
  events_.pop_front();
  return true;
}

void EventQueue::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
  arrived_.notify_all();
}

// Frames of one worker's lane, handed to its job; an error ends that job and nothing else.
class Core::LaneSink : public Sink {
 public:
  LaneSink(Core& core, JobShard& job, int rank) : core_(core), job_(job), rank_(rank) {}

  std::byte* destination(Lane&, const Header&) override { return nullptr; }

  void frame(Lane&, const Header& header, const std::byte* payload) override {
    try {
      if (header.kind != FrameKind::bye) return job_.frame(rank_, header, payload);
      said_bye_ = true;
      if (!job_.failed()) job_.leave(rank_);
    } catch (const Error& error) {
      core_.fail_job(job_, error);
    } catch (const std::exception& error) {  // out of memory, say: the end of this job only
      core_.fail_job(job_, Error(ErrorCode::internal, std::string("[pbox] ") + error.what()));
    }
  }

  void closed(Lane& lane, const Error& why) override {
    job_.detach(lane);
    if (said_bye_ || job_.failed()) return;
    const char* what = why.code == ErrorCode::peer_lost ? " was lost: " : " broke its lane: ";
    const std::string text = "[pbox] rank " + std::to_string(rank_) + what + why.what();
    core_.fail_job(job_, Error(why.code, text, rank_));
  }

 private:
  Core& core_;
  JobShard& job_;
  const int rank_;
  bool said_bye_ = false;
};

Core::Core(int index, EventQueue& events, int spin_us)
    : index_(index), events_(events), spin_us_(spin_us), thread_([this] { run(); }) {}

Core::~Core() {
  call([](Core& core) { core.stop_ = true; });
  thread_.join();
}

// The error crosses as a copy: an exception object would be shared by both threads.
void Core::call(const std::function<void(Core&)>& command) {
  std::promise<std::optional<Error>> done;
  {
    const std::lock_guard guard(mutex_);
    commands_.push_back([&] {
      std::optional<Error> failed;
      try {
        command(*this);
      } catch (const Error& error) {
        failed.emplace(error.code, std::string(error.what()), error.rank);
      } catch (const std::exception& error) {
        failed.emplace(ErrorCode::internal, std::string("[pbox] ") + error.what());
      }
      done.set_value(std::move(failed));
    });
  }
  poller_.ring();
  if (const std::optional<Error> failed = done.get_future().get())
    throw Error(failed->code, std::string(failed->what()), failed->rank);
}

JobShard& Core::add_job(uint32_t id, int workers) {
  auto& job = jobs_[id];
  job = std::make_unique<JobShard>(id, workers, index_);
  return *job;
}

JobShard& Core::job(uint32_t id) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end())
    throw Error(ErrorCode::config,
                "[pbox] there is no job " + std::to_string(id) + "; it has ended");
  return *found->second;
}

void Core::drop_job(uint32_t id) {
  remove_lanes([&](const Entry& entry) { return entry.lane->owner == jobs_[id].get(); });
  jobs_.erase(id);
}

void Core::attach(uint32_t job_id, int rank, std::unique_ptr<Lane> lane) {
  JobShard& owner = job(job_id);
  auto entry = std::make_unique<Entry>();
  entry->lane = std::move(lane);
  entry->lane->peer = rank;
  entry->lane->owner = &owner;
  entry->lane->corked = true;  // `run` comes back to it before it sleeps
  entry->sink = std::make_unique<LaneSink>(*this, owner, rank);
  poller_.add(*entry->lane);  // first: the job must not keep a lane that could not be added
  owner.attach(rank, *entry->lane);
  lanes_.push_back(std::move(entry));
}

void Core::fail_job(JobShard& job, const Error& error) {
  if (job.failed()) return;
  job.fail(error);
  events_.push({job.id, error.code, error.rank, error.what()});
}

void Core::remove_lanes(const std::function<bool(const Entry&)>& which) {
  std::erase_if(lanes_, [&](const std::unique_ptr<Entry>& entry) {
    if (!which(*entry)) return false;
    if (!entry->gone) poller_.remove(*entry->lane);
    return true;
  });
}

void Core::run() {
  while (!stop_) {
    try {
      look_around();
    } catch (const std::exception& error) {  // else it would end the process, and all of its jobs
      const std::string text = "[pbox] core " + std::to_string(index_) + ": " + error.what();
      for (auto& [id, job] : jobs_) fail_job(*job, Error(ErrorCode::internal, text));
    }
  }
}

void Core::look_around() {
  bool moved = run_commands();
  check_life();
  moved |= move_lanes();
  moved |= work();
  if (stop_) return;
  if (moved) {
    active_ = Clock::now();
  } else if (std::chrono::duration<double, std::micro>(Clock::now() - active_).count() < spin_us_) {
    std::this_thread::yield();  // whoever pushes next may need this processor
  } else {
    sleep();
    active_ = Clock::now();
  }
}

bool Core::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard guard(mutex_);
    commands.swap(commands_);
  }
  for (auto& command : commands) command();
  return !commands.empty();
}

void Core::check_life() {
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - life_checked_).count() < kLifeSeconds) return;
  life_checked_ = now;
  for (auto& entry : lanes_) entry->lane->check_life(*entry->sink);
}

bool Core::move_lanes() {
  bool moved = poller_.wait(0, ready_);  // marks the lanes whose descriptor has something
  for (auto& entry : lanes_) {
    if (entry->gone) continue;
    moved |= entry->lane->progress(*entry->sink, kLaneBudget);
    const auto& job = *static_cast<const JobShard*>(entry->lane->owner);
    // The end of the lane wakes a worker that sleeps until more than the error has come.
    if (job.failed() && entry->lane->idle() && !std::exchange(entry->ended, true))
      entry->lane->end_sending();
    if (!entry->lane->is_closed()) continue;
    poller_.remove(*entry->lane);
    entry->gone = true;
  }
  return moved;
}

bool Core::work() {
  bool busy = false;
  for (auto& [id, job] : jobs_) {
    job->forget_retired();
    try {
      busy |= job->work(kWorkSlice);
    } catch (const Error& error) {
      fail_job(*job, error);
      busy = true;
    } catch (const std::exception& error) {
      fail_job(*job, Error(ErrorCode::internal, std::string("[pbox] ") + error.what()));
      busy = true;
    }
  }
  return busy;
}

void Core::sleep() {
  bool busy = false;
  for (auto& entry : lanes_) {
    if (entry->gone) continue;
    const bool write = entry->lane->wants_write();
    if (write != entry->write_watched)
      poller_.watch_write(*entry->lane, entry->write_watched = write);
    busy |= entry->lane->arm(1);
  }
  if (!busy) poller_.wait(lanes_.empty() ? -1 : static_cast<int>(kLifeSeconds * 1e3), ready_);
  for (auto& entry : lanes_)
    if (!entry->gone) entry->lane->disarm();
}

}  // namespace phub
