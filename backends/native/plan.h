// A plan: the steps of one rank in a collective of a certain number of elements, as computed by
// backends/schedule.py, and what follows from them. Immutable.
#pragma once

#include <cstddef>
#include <vector>

#include "error.h"

namespace phub {

inline constexpr int kNobody = -1;

struct Range {  // of elements
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};

// At most one send and one receive. Receives are applied in the order of the steps; a step's send
// may start when the receives of all earlier steps have been applied.
struct Step {
  int send_to = kNobody;
  Range send;
  int recv_from = kNobody;
  Range recv;
  bool reduce = false;  // fold what is received into the buffer, else overwrite
};

class Plan {
 public:
  // `reduces`: an allreduce; else nothing is folded and every value that is sent is a result.
  // Throws Error(config) when the steps cannot be a rank's part of such a collective.
  Plan(size_t count, std::vector<Step> steps, bool reduces);

  size_t count() const { return count_; }
  const std::vector<Step>& steps() const { return steps_; }
  bool reduces() const { return reduces_; }
  // The ranges whose results are made on this rank: those that no receive overwrites. They are
  // complete, and are scaled, when the receives of the first `finish_at()` steps are applied.
  const std::vector<Range>& owned() const { return owned_; }
  size_t finish_at() const { return finish_at_; }
  // What this step sends is a result; else it is a partial sum.
  bool sends_result(size_t step) const { return sends_result_[step]; }
  // Peers that this rank sends to, or receives from; ascending.
  const std::vector<int>& receivers() const { return receivers_; }
  const std::vector<int>& senders() const { return senders_; }

 private:
  void check() const;
  void find_owned();
  void find_results();

  const size_t count_;
  const std::vector<Step> steps_;
  const bool reduces_;
  std::vector<Range> owned_;
  size_t finish_at_ = 0;
  std::vector<bool> sends_result_;
  std::vector<int> receivers_, senders_;
};

}  // namespace phub
