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
  adam,    // the same with Adam
};

// Arrays of the same size in bytes; those that a walk does not need may be absent.
struct WalkArrays {
  std::vector<const void*> in;
  void* out = nullptr;
  const void* weights = nullptr;
  std::vector<void*> state;  // of the optimizer, at most two
  size_t bytes = 0;
};

// How a walk goes: each thread does its part of the arrays, chunk after chunk, and takes the time
// after every `slice` chunks.
struct Steps {
  size_t chunk_bytes;
  size_t slice;
  int threads;
};

// The rules of the walks, and the steps that their state has in it.
inline constexpr SgdParams kWalkSgd{0.01, 0.9, 0.0, 1e-4, false, false};
inline constexpr AdamParams kWalkAdam{1e-3, 0.9, 0.999, 1e-8, 1e-4, false, false, false};
inline constexpr uint32_t kWalkTaken = 10;

// One walk; seconds of each whole slice, by thread. t: a type that is accumulated in itself.
std::vector<std::vector<double>> walk(Walk what, DType t, const WalkArrays& arrays,
                                      const Steps& steps, Stores stores);

// How cores share the work on a model (paper section 3.2).
enum class Way {
  tall,  // each does whole chunks: sums, then optimizes, while they are in its cache
  wide,  // all do a part of one key after another: they sum it, meet, optimize it, and meet
};

// Times of `rounds` aggregations, each with a step of SGD, of a model whose keys of so many bytes
// stand one behind the other in all arrays. merged: where `wide` sums. Seconds of each round.
std::vector<double> aggregate(Way way, DType t, const WalkArrays& arrays, void* merged,
                              const std::vector<size_t>& keys, const Steps& steps, Stores stores,
                              int rounds);

}  // namespace phub
