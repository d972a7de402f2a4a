// The worker's engine: moves all lanes of one process's context (to PBox cores, to other workers).
//
// Thread contract: one mutex guards the engine, its lanes and the protocols on them (PboxClient,
// Mesh). Whoever waits drives: `wait` moves lanes on the calling thread, so a blocking call costs
// no hand-over. A background thread drives only while there is unfinished asynchronous work and
// nobody waits; otherwise it sleeps on a condition variable. Nobody holds the mutex while asleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "lane.h"
#include "poller.h"

namespace phub {

class Engine {
 public:
  explicit Engine(int spin_us = 0);
  ~Engine();  // lanes must have been removed

  using Guard = std::unique_lock<std::mutex>;
  Guard lock() { return Guard(mutex_); }

  // All below: with the lock held.
  void add(std::unique_ptr<Lane> lane, Sink& sink);
  void remove(Lane& lane);           // closes and destroys it; not from inside a Sink call
  void flush(Lane& lane);            // after queueing frames: moves them, updates EPOLLOUT
  // Expected bytes on this lane before its waiter has something to do; used when going to sleep.
  void expect(Lane& lane, size_t bytes);
  void async_begin() { ++async_; wake_background(); }
  void async_end() { --async_; }
  void completed() { completed_ = true; }  // something that someone may wait for has finished

  // Drives until done() (called with the lock held) or the deadline; false on the deadline.
  // Takes the lock itself. timeout_s < 0: no deadline.
  bool wait(const std::function<bool()>& done, double timeout_s);
  // Moves everything once without sleeping; lock held by the caller.
  bool progress_once();

  int bell() const { return poller_.bell(); }

 private:
  struct Entry {
    std::unique_ptr<Lane> lane;
    Sink* sink;
    size_t expected = 1;
    bool write_watched = false;
  };
  void wake_background();
  void background();
  bool arm_all();

  // guarded by mutex_
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  int async_ = 0;
  int waiters_ = 0;
  bool completed_ = false;
  bool stop_ = false;
  bool background_asleep_ = false;
  // self-synchronised
  Poller poller_;
  std::condition_variable background_cv_;
  std::vector<int> waiter_bells_;
  int spin_us_;
  std::thread thread_;
};

}  // namespace phub
