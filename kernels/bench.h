// Timed walks over large arrays, for `phub bench kernels`: what the kernels take beside what the
// machine's memory gives.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/cpu.h"

namespace phub {

enum class Walk {
  read,    // all of in[0]
  copy,    // out = in[0]: libc's memcpy, or streamed
  triad,   // out = in[0] + 3 * in[1], of floats
  reduce,  // out = average of all inputs
  sgd,     // a step of SGD with momentum with that average, from `weights` to `out`
};

// Arrays of the same size in bytes; those that a walk does not need may be absent.
struct WalkArrays {
  std::vector<const void*> in;
  void* out = nullptr;
  const void* weights = nullptr;
  void* momentum = nullptr;
  size_t bytes = 0;
};

// How a walk goes: each thread does its part of the arrays, chunk after chunk, and takes the time
// after every `slice` chunks.
struct Steps {
  size_t chunk_bytes;
  size_t slice;
  int threads;
};

// SGD as in the walk.
inline constexpr SgdParams kWalkSgd{0.01, 0.9, 0.0, 1e-4, false, false};

// One walk; seconds of each whole slice, by thread. t: a type that is accumulated in itself.
std::vector<std::vector<double>> walk(Walk what, DType t, const WalkArrays& arrays,
                                      const Steps& steps, Stores stores);

}  // namespace phub
