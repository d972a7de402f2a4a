// A PBox's data plane: its cores, and what the control plane (Python) asks of them. Thread
// contract: every method may be called from any thread; none blocks longer than a core's slice.
#pragma once

#include <memory>
#include <vector>

#include "core.h"

namespace phub {

class Server {
 public:
  explicit Server(int cores, int spin_us = 0);  // spin_us: see Core

  int cores() const { return static_cast<int>(cores_.size()); }

  void add_job(uint32_t id, int workers);
  // Makes the table's memory and registers it on every core; returns when all have it.
  std::shared_ptr<Table> add_table(uint32_t job, TableInfo info, int workers);
  void drop_table(uint32_t job, uint32_t table);
  // A rank is done with a table: who pushes it from now on, or waits for an answer, gets `error`.
  void end_table(uint32_t job, uint32_t table, const Error& error);
  void attach(uint32_t job, int rank, int core, std::unique_ptr<Lane> lane);
  void fail_job(uint32_t job, const Error& error);  // no effect on a job that has ended
  void drop_job(uint32_t job);
  std::vector<Stalled> stalled(uint32_t job);
  uint64_t chunks_answered(uint32_t job);
  bool next_event(JobEvent& event, double timeout_s) { return events_.pop(event, timeout_s); }
  void close_events() { events_.close(); }  // next_event returns at once from now on

 private:
  EventQueue events_;
  std::vector<std::unique_ptr<Core>> cores_;
};

}  // namespace phub
