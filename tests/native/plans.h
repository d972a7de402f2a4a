// Plans for native tests: what schedule.py computes, for a ring, for halving and doubling of 2^k
// ranks, and for a broadcast along a chain.
#pragma once

#include <memory>

#include "plan.h"

namespace test {

using namespace phub;
using PlanMaker = std::shared_ptr<const Plan> (*)(int rank, int size, size_t count);

inline void add_step(std::vector<Step>& steps, Step step) {
  if (step.send.size() == 0) step.send_to = kNobody;
  if (step.recv.size() == 0) step.recv_from = kNobody;
  if (step.send_to != kNobody || step.recv_from != kNobody) steps.push_back(step);
}

inline std::shared_ptr<const Plan> ring_plan(int rank, int size, size_t count) {
  const auto piece = [&](int index) {
    const auto i = static_cast<size_t>((index % size + size) % size), n = static_cast<size_t>(size);
    return Range{i * count / n, (i + 1) * count / n};
  };
  std::vector<Step> steps;
  for (int gather = 0; gather < 2; ++gather)
    for (int s = 0; s < size - 1; ++s)
      add_step(steps, {(rank + 1) % size, piece(rank + gather - s), (rank - 1 + size) % size,
                       piece(rank + gather - s - 1), gather == 0});
  return std::make_shared<Plan>(count, steps, true);
}

inline std::shared_ptr<const Plan> halving_plan(int rank, int size, size_t count) {
  std::vector<Step> halving, steps;
  size_t begin = 0, end = count;
  for (int distance = size / 2; distance > 0; distance /= 2) {
    const size_t middle = begin + (end - begin) / 2;
    const Range lower{begin, middle}, upper{middle, end};
    const bool low = (rank & distance) == 0;
    halving.push_back(
        {rank ^ distance, low ? upper : lower, rank ^ distance, low ? lower : upper, true});
    (low ? end : begin) = middle;
  }
  for (const Step& step : halving) add_step(steps, step);
  for (size_t i = halving.size(); i-- > 0;)
    add_step(steps,
             {halving[i].send_to, halving[i].recv, halving[i].recv_from, halving[i].send, false});
  return std::make_shared<Plan>(count, steps, true);
}

// From rank 0 to 1 to 2 and so on.
inline std::shared_ptr<const Plan> chain_plan(int rank, int size, size_t count) {
  std::vector<Step> steps;
  if (rank > 0) add_step(steps, {kNobody, {}, rank - 1, {0, count}, false});
  if (rank + 1 < size) add_step(steps, {rank + 1, {0, count}, kNobody, {}, false});
  return std::make_shared<Plan>(count, steps, false);
}

}  // namespace test
