// What a core thread or a worker's engine sleeps in: epoll over its lanes' descriptors and one
// bell (an eventfd) that shared-memory lanes and other threads ring.
#pragma once

#include <vector>

#include "lane.h"

namespace phub {

class Poller {
 public:
  Poller();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  int bell() const { return bell_; }   // to be rung: write 8 bytes
  int epoll() const { return epoll_; } // readable when `wait` would return something
  void ring();                         // async-signal-safe, any thread

  void add(Lane& lane);
  void remove(Lane& lane);
  void watch_write(Lane& lane, bool on);  // keep in step with lane.wants_write()

  // Sleeps up to timeout_ms (-1: for ever, 0: not at all) or until a signal. Returns lanes whose
  // descriptor is ready, and marks them so; clears the bell and reports whether it was rung.
  bool wait(int timeout_ms, std::vector<Lane*>& ready);

 private:
  void close_all();

  int epoll_ = -1, bell_ = -1;
};

}  // namespace phub
