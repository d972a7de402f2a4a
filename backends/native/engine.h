// The worker's engine: moves all lanes of one process's context (to PBox cores, to other workers).
//
// Thread contract: one mutex guards the engine, its lanes and the protocols on them (PboxClient,
// Mesh). Whoever waits drives: `wait` moves lanes on the calling thread, so a blocking call costs
// no hand-over. A background thread drives only while there is unfinished asynchronous work and
// nobody waits; otherwise it sleeps on a condition variable. Nobody holds the mutex while asleep.
#pragma once

#include <atomic>
#include <chrono>
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
  // spin_us: how long a waiter goes on looking, and yielding its processor, before it sleeps.
  explicit Engine(int spin_us = 0);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  using Guard = std::unique_lock<std::mutex>;
  Guard lock() {
    ++wanted_;
    Guard guard(mutex_);
    --wanted_;
    wanted_.notify_all();  // see give_way
    return guard;
  }

  // --- with the lock held ---
  Lane& add(std::unique_ptr<Lane> lane, Sink& sink);
  void remove(Lane& lane);  // destroys it without a call to its sink; not from inside a sink call
  // After queueing frames on lanes: whoever sleeps shall look again at lanes that could not send.
  void kick();
  // Bytes that must arrive on this lane before its waiter has something to do: fewer wake-ups.
  void expect(Lane& lane, size_t bytes);
  void async_begin();  // unfinished asynchronous work: the background thread drives
  void async_end() { --async_; }
  void completed() { completed_ = true; }  // something that somebody may wait for has finished
  bool progress_once();  // moves all lanes without sleeping; true when anything moved

  // --- takes the lock itself ---
  // Drives until done() (called with the lock held) is true; false when timeout_s passed first
  // (negative: no limit).
  bool wait(const std::function<bool()>& done, double timeout_s);

  int bell() const { return poller_.bell(); }

 private:
  struct Entry {
    std::unique_ptr<Lane> lane;
    Sink* sink;
    size_t expected = 1;
    bool write_watched = false;
    bool gone = false;  // closed and out of the poller
  };
  class Waiter;  // a thread in `wait`, with a bell of its own

  void background();
  void fail(const Error& error);  // closes all lanes, which tells their sinks
  void let_others_run(Guard& guard);
  void give_way(Guard& guard);  // to a thread that waits for the lock
  void progress(Entry& entry);
  void check_life();
  bool arm();
  void disarm();
  // Sleeps, without the lock, until a lane, the engine's bell or `bell` (-1: none) has something.
  void sleep(Guard& guard, int bell, double seconds);

  // guarded by mutex_
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<int> waiters_;  // bells of the threads in `wait`
  std::vector<int> spare_bells_;
  std::vector<Lane*> ready_;
  int async_ = 0;
  int sleepers_ = 0;
  std::chrono::steady_clock::time_point life_checked_{};
  bool moved_ = false;
  bool completed_ = false;
  bool stop_ = false;
  std::condition_variable background_cv_;
  // self-synchronised
  std::atomic<int> wanted_ = 0;  // threads that wait for the lock
  Poller poller_;
  const int spin_us_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace phub
