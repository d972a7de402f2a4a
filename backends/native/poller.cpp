#include "poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace phub {
namespace {

constexpr int kEvents = 64;  // taken by one call
constexpr uint32_t kRead = EPOLLIN | EPOLLRDHUP;

void control(int epoll, int operation, int fd, uint32_t events, void* data) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = data;
  if (epoll_ctl(epoll, operation, fd, &event) != 0) throw system_error("[poller] epoll_ctl", errno);
}

}  // namespace

Poller::Poller() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_ < 0 || bell_ < 0) {
    const int number = errno;
    close_all();
    throw system_error("[poller] epoll_create/eventfd", number);
  }
  control(epoll_, EPOLL_CTL_ADD, bell_, EPOLLIN, nullptr);
}

Poller::~Poller() { close_all(); }

void Poller::close_all() {
  if (epoll_ >= 0) close(epoll_);
  if (bell_ >= 0) close(bell_);
}

void Poller::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(bell_, &one, sizeof one);  // full: it is rung
}

void Poller::add(Lane& lane) { control(epoll_, EPOLL_CTL_ADD, lane.fd(), kRead, &lane); }

void Poller::remove(Lane& lane) { control(epoll_, EPOLL_CTL_DEL, lane.fd(), 0, nullptr); }

void Poller::watch_write(Lane& lane, bool on) {
  control(epoll_, EPOLL_CTL_MOD, lane.fd(), on ? kRead | EPOLLOUT : kRead, &lane);
}

bool Poller::wait(int timeout_ms, std::vector<Lane*>& ready) {
  ready.clear();
  epoll_event events[kEvents];
  const int count = epoll_wait(epoll_, events, kEvents, timeout_ms);
  bool rung = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr != nullptr) {
      ready.push_back(static_cast<Lane*>(events[i].data.ptr));
      ready.back()->fd_ready = true;
      continue;
    }
    uint64_t times;
    rung = read(bell_, &times, sizeof times) == sizeof times || rung;
  }
  return rung;
}

}  // namespace phub
