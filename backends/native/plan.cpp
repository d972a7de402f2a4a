#include "plan.h"

#include <algorithm>
#include <string>
#include <utility>

namespace phub {
namespace {

// `ranges` without `cut`.
std::vector<Range> subtract(const std::vector<Range>& ranges, Range cut) {
  std::vector<Range> rest;
  for (const Range& range : ranges) {
    const Range left{range.begin, std::min(range.end, cut.begin)};
    const Range right{std::max(range.begin, cut.end), range.end};
    if (left.begin < left.end) rest.push_back(left);
    if (right.begin < right.end) rest.push_back(right);
  }
  return rest;
}

// Elements of `range` that lie in none of `ranges`.
size_t outside(Range range, const std::vector<Range>& ranges) {
  std::vector<Range> rest{range};
  for (const Range& other : ranges) rest = subtract(rest, other);
  size_t count = 0;
  for (const Range& piece : rest) count += piece.size();
  return count;
}

void sort_unique(std::vector<int>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

[[noreturn]] void refuse(size_t step, const std::string& what) {
  throw Error(ErrorCode::config, "[plan] step " + std::to_string(step) + " " + what);
}

}  // namespace

Plan::Plan(size_t count, std::vector<Step> steps, bool reduces)
    : count_(count), steps_(std::move(steps)), reduces_(reduces), sends_result_(steps_.size()) {
  check();
  find_owned();
  find_results();
  for (const Step& step : steps_) {
    if (step.send_to != kNobody) receivers_.push_back(step.send_to);
    if (step.recv_from != kNobody) senders_.push_back(step.recv_from);
  }
  sort_unique(receivers_);
  sort_unique(senders_);
}

void Plan::check() const {
  const auto check_transfer = [&](size_t step, int peer, Range range) {
    if (peer == kNobody) return;
    if (peer < 0) refuse(step, "names rank " + std::to_string(peer));
    if (range.begin >= range.end || range.end > count_)
      refuse(step, "moves elements " + std::to_string(range.begin) + " to " +
                       std::to_string(range.end) + " of " + std::to_string(count_));
  };
  for (size_t i = 0; i < steps_.size(); ++i) {
    check_transfer(i, steps_[i].send_to, steps_[i].send);
    check_transfer(i, steps_[i].recv_from, steps_[i].recv);
    if (steps_[i].reduce && !reduces_) refuse(i, "reduces in a collective that does not");
  }
}

void Plan::find_owned() {
  if (count_ > 0) owned_.push_back({0, count_});
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i].recv_from == kNobody) continue;
    if (steps_[i].reduce)
      finish_at_ = i + 1;
    else
      owned_ = subtract(owned_, steps_[i].recv);
  }
}

void Plan::find_results() {
  std::vector<Range> results;
  if (finish_at_ == 0) results = owned_;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.send_to != kNobody) {
      const size_t partial = outside(step.send, results);
      if (partial > 0 && partial < step.send.size()) refuse(i, "sends results and partial sums");
      if (partial > 0 && !reduces_) refuse(i, "sends what it has not received");
      sends_result_[i] = partial == 0;
    }
    if (step.recv_from != kNobody && !step.reduce) results.push_back(step.recv);
    if (i + 1 == finish_at_) results.insert(results.end(), owned_.begin(), owned_.end());
  }
}

}  // namespace phub
