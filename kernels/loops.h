// The loops of one instruction set, as a table of functions. reduce.cpp and step.cpp
// choose a table (isa.cpp) and split their work into calls that the loops can do in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"
#include "kernels/update.h"

namespace phub {

// Arrays that one pass reads, at most. More streams than a cache set has ways (8) evict
// each other's lines when all arrays start at the same offset of a page.
inline constexpr int kStreams = 8;
inline constexpr int kTargets = kStreams + 1;  // every worker's array, and the weights

// Destinations of one pass, all of one type.
struct Targets {
  void* array[kTargets];
  bool streaming[kTargets];
  bool any_streaming;
  int n;
  size_t head;  // elements before the streamed arrays reach a multiple of 64 bytes
};

// A rule as the loops have it. SGD's momentum is not used, set by this step, or updated by it.
enum class Rule { sgd, sgd_first, sgd_momentum, adam, amsgrad };
inline constexpr int kRules = 5;

struct StepPass {
  SgdParams sgd;  // of these two, that of the rule
  AdamParams adam;
  double scale;    // of the gradient
  uint32_t taken;  // steps before this one
  // In the accumulator's type.
  const void* weights_in;
  void* weights_out;  // nullptr: written through the targets only
  void* state[kMaxStates];

  // From `bytes` further on.
  StepPass at(size_t bytes) const {
    StepPass pass = *this;
    pass.weights_in = static_cast<const char*>(weights_in) + bytes;
    if (weights_out) pass.weights_out = static_cast<char*>(weights_out) + bytes;
    for (void*& array : pass.state)
      if (array) array = static_cast<char*>(array) + bytes;
    return pass;
  }
};

// Each loop does `lines` lines of 64 bytes of the type on the wire, and reads n <= kStreams arrays.
struct Loops {
  // acc (of accumulator type) = op over n arrays, and over acc itself unless `first`.
  using Accumulate = void (*)(void* acc, const void* const* in, int n, size_t lines, bool first,
                              double pre);
  // targets = post * sum over n arrays.
  using Sum = void (*)(const Targets& out, const void* const* in, int n, size_t lines, double post);
  // One optimizer step with the sum of n arrays as the gradient.
  using Step = void (*)(const StepPass& pass, const Targets& out, const void* const* in, int n,
                        size_t lines);

  static constexpr int kOps = 4;     // sum, min, max, product
  static constexpr int kFloats = 4;  // the floating types are the first ones of DType
  Accumulate accumulate[kDTypes][kOps];
  Sum sum[kFloats];
  Sum narrow[kDTypes];        // from one array of accumulator type; integers are copied
  Step step[kFloats][kRules];      // gradients of the wire's type
  Step step_acc[kFloats][kRules];  // from one gradient of accumulator type
};

// A table, or nullptr where the loops cannot be compiled.
const Loops* loops_baseline();
const Loops* loops_avx2();
const Loops* loops_avx512();

}  // namespace phub
