// A core of a PBox: one thread that owns its chunks (of all jobs), their accumulators and optimizer
// state, and its lanes. Other threads only `post` commands to it. It sleeps in its poller when
// there is nothing to do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "job.h"
#include "poller.h"

namespace phub {

// Events for the control plane. Self-synchronised.
class EventQueue {
 public:
  void push(JobEvent event);
  // Waits up to timeout_s; false: nothing came, or the queue was closed.
  bool pop(JobEvent& event, double timeout_s);
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<JobEvent> events_;
  bool closed_ = false;
};

class Core {
 public:
  // spin_us: how long it goes on looking, and yielding its processor, before it sleeps.
  Core(int index, EventQueue& events, int spin_us = 0);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Any thread: runs `command` on the core's thread and returns when it is done. What it throws is
  // thrown here.
  void call(const std::function<void(Core&)>& command);

  // --- on the core's thread only ---
  JobShard& add_job(uint32_t id, int workers);
  JobShard& job(uint32_t id);  // throws Error(config) when there is none
  void drop_job(uint32_t id);
  void attach(uint32_t job, int rank, std::unique_ptr<Lane> lane);
  void fail_job(JobShard& job, const Error& error);

 private:
  class LaneSink;
  struct Entry {
    std::unique_ptr<Lane> lane;
    std::unique_ptr<LaneSink> sink;
    bool write_watched = false;
    bool ended = false;  // its job has failed, and the worker was told
    bool gone = false;
  };

  using Clock = std::chrono::steady_clock;

  void run();
  void look_around();
  bool run_commands();
  bool move_lanes();
  void check_life();
  bool work();
  void sleep();
  void remove_lanes(const std::function<bool(const Entry&)>& which);

  // core thread only
  const int index_;
  EventQueue& events_;
  const int spin_us_;
  std::map<uint32_t, std::unique_ptr<JobShard>> jobs_;
  std::vector<std::unique_ptr<Entry>> lanes_;
  std::vector<Lane*> ready_;
  Clock::time_point life_checked_{}, active_{};
  bool stop_ = false;
  // guarded by mutex_
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  // self-synchronised
  Poller poller_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace phub
