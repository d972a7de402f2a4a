// The loops do whole lines; here they get any number of elements. The ragged ends of arrays (before
// the first line to be streamed, behind the last one) go through padded copies.
#include <cstring>

#include "kernels/passes.h"

namespace phub {
namespace {

constexpr size_t kMaxLine = 128;  // bytes of accumulators in a line of 16-bit floats

// A line of its own with `size` bytes of an array, padded with zeros.
struct Padded {
  alignas(64) std::byte line[kMaxLine] = {};
  Padded() = default;
  Padded(const void* from, size_t size) { std::memcpy(line, from, size); }
};

// Some elements of each input of a pass as padded lines.
class PaddedInputs {
 public:
  PaddedInputs(const void* const* in, int n, size_t item, size_t begin, size_t count) {
    for (int k = 0; k < n; ++k) {
      std::memcpy(lines_[k].line, advance(in[k], begin * item), count * item);
      view[k] = lines_[k].line;
    }
  }
  const void* view[kStreams];

 private:
  Padded lines_[kStreams];
};

// As many padded lines as there are targets.
class PaddedTargets {
 public:
  explicit PaddedTargets(const Targets& out) : out_(out) {
    targets.n = out.n;
    for (int o = 0; o < out.n; ++o) targets.array[o] = lines_[o].line;
  }
  void copy_back(size_t item, size_t begin, size_t count) const {
    for (int o = 0; o < out_.n; ++o)
      std::memcpy(advance(out_.array[o], begin * item), lines_[o].line, count * item);
  }
  Targets targets{};

 private:
  const Targets& out_;
  Padded lines_[kTargets];
};

size_t lanes_of(DType t) { return 64 / item_size(t); }

// Calls whole(begin, lines) and ragged(begin, count) for the parts of `count` elements.
template <class Whole, class Ragged>
void split(DType t, size_t count, size_t head, const Whole& whole, const Ragged& ragged) {
  const size_t lanes = lanes_of(t);
  head = std::min(head, count);
  const size_t lines = (count - head) / lanes, end = head + lines * lanes;
  if (head > 0) ragged(size_t{0}, head);
  if (lines > 0) whole(head, lines);
  if (end < count) ragged(end, count - end);
}

Targets later(Targets out, size_t bytes) {
  for (int o = 0; o < out.n; ++o) out.array[o] = advance(out.array[o], bytes);
  return out;
}

}  // namespace

void run(Loops::Accumulate loop, DType t, void* acc, const View& in, size_t count, bool first,
         double pre) {
  const size_t item = item_size(accumulator_type(t));
  const auto whole = [&](size_t, size_t lines) { loop(acc, in.array, in.n, lines, first, pre); };
  const auto ragged = [&](size_t begin, size_t size) {
    const PaddedInputs inputs(in.array, in.n, item_size(t), begin, size);
    void* const at = advance(acc, begin * item);
    Padded result;
    if (!first) std::memcpy(result.line, at, size * item);
    loop(result.line, inputs.view, in.n, 1, first, pre);
    std::memcpy(at, result.line, size * item);
  };
  split(t, count, 0, whole, ragged);
}

void run(Loops::Sum loop, DType t, const Targets& out, const View& in, size_t count, double post) {
  const auto whole = [&](size_t begin, size_t lines) {
    loop(later(out, begin * item_size(t)), in.at(begin).array, in.n, lines, post);
  };
  const auto ragged = [&](size_t begin, size_t size) {
    const PaddedInputs inputs(in.array, in.n, in.item, begin, size);
    PaddedTargets padded(out);
    loop(padded.targets, inputs.view, in.n, 1, post);
    padded.copy_back(item_size(t), begin, size);
  };
  split(t, count, out.head, whole, ragged);
}

void run(Loops::Step loop, DType t, const StepPass& pass, const Targets& out, const View& in,
         size_t count) {
  const size_t item = item_size(accumulator_type(t));
  const auto whole = [&](size_t begin, size_t lines) {
    loop(pass.at(begin * item), later(out, begin * item_size(t)), in.at(begin).array, in.n, lines);
  };
  const auto ragged = [&](size_t begin, size_t size) {
    const PaddedInputs inputs(in.array, in.n, in.item, begin, size);
    PaddedTargets padded(out);
    const StepPass there = pass.at(begin * item);
    Padded weights(there.weights_in, size * item), state[kMaxStates];
    StepPass here = there;
    here.weights_in = weights.line;
    here.weights_out = there.weights_out ? weights.line : nullptr;
    for (int s = 0; s < kMaxStates; ++s) {
      if (there.state[s]) std::memcpy(state[s].line, there.state[s], size * item);
      here.state[s] = state[s].line;
    }
    loop(here, padded.targets, inputs.view, in.n, 1);
    if (there.weights_out) std::memcpy(there.weights_out, weights.line, size * item);
    for (int s = 0; s < kMaxStates; ++s)
      if (there.state[s]) std::memcpy(there.state[s], state[s].line, size * item);
    padded.copy_back(item_size(t), begin, size);
  };
  split(t, count, out.head, whole, ragged);
}

}  // namespace phub
