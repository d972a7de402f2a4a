// The arithmetic of a PBox core on CPU: reductions over the workers' arrays and optimizer steps.
//
// Contract of all functions: any count (also 0) and any alignment; two arrays coincide exactly or
// do not overlap; safe from any thread; nothing is allocated or remembered. Arrays are combined in
// the order given, and results are bitwise the same on every instruction set (except for which NaN
// a NaN is). 16-bit floats are accumulated in fp32 and rounded once, to nearest even. Integers wrap
// around. A wrong argument throws std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"
#include "kernels/update.h"

namespace phub {

// Instruction sets the loops are compiled for; the best that this machine has is the default.
enum class Isa { baseline = 0, avx2 = 1, avx512 = 2 };
bool has_isa(Isa isa);
Isa best_isa();

// Where results go. `streaming` writes past the caches: for tables much larger than the last-level
// cache, whose results nobody reads before they would be evicted anyway. Arrays that are also read
// are written `cached` whatever is asked for.
enum class Stores { cached, streaming };

struct Execution {
  Isa isa = best_isa();
  Stores stores = Stores::cached;
};

// Factors of a reduction. `pre` multiplies every element before, `post` the result after; both act
// on floating types only and in the accumulator's type. `divisor` acts on integers under
// ReduceOp::average only and rounds down (an average of floats has 1/N in `post`).
struct Scale {
  double pre = 1.0;
  double post = 1.0;
  int divisor = 1;
};

// Each of the n_out (>= 1) arrays `outs` = op over the n (>= 1) arrays `in`, all of type t. Outputs
// may coincide with inputs. min and max propagate NaN. bool: sum and max are OR, product and min
// are AND.
void reduce(DType t, ReduceOp op, void* const* outs, int n_out, const void* const* in, int n,
            size_t count, const Scale& scale = {}, const Execution& execution = {});

// The same in pieces, as arrays arrive. `acc` has accumulator_type(t); the first array sets it.
// Folding all arrays and finishing equals `reduce` bitwise. `fold` uses scale.pre, `finish` the
// rest. In `finish` out may be acc when t is its own accumulator type.
void fold(DType t, ReduceOp op, void* acc, const void* in, size_t count, bool first,
          const Scale& scale = {}, const Execution& execution = {});
void finish(DType t, ReduceOp op, void* out, const void* acc, size_t count, const Scale& scale = {},
            const Execution& execution = {});

// Copies bytes; arrays must not overlap. Stores::streaming is for what nobody reads again soon: it
// fetches no line just to overwrite it, a third of the traffic.
void copy(void* out, const void* in, size_t bytes, const Execution& execution);

// What an optimizer step of a model of floating type t reads and writes. Weights and state have
// accumulator_type(t).
struct StepArrays {
  const void* weights_in = nullptr;
  void* weights_out = nullptr;  // may be weights_in; else the model is double-buffered
  void* state[kMaxStates] = {};  // read and written: the first state_arrays(update) of them
  void* const* outs = nullptr;  // n_out further copies of the new weights, of type t;
  int n_out = 0;  // one that is weights_out is skipped
};

// One step of an optimizer; gradient = scale.post * `acc`, which has accumulator_type(t). `taken`:
// steps that the state has in it; at 0 SGD does not read its momentum, Adam's state must be zeros.
void step(DType t, const Update& update, const StepArrays& arrays, const void* acc, size_t count,
          const Scale& scale, uint32_t taken, const Execution& execution = {});

// The same with gradient = post * sum(pre * in[k]) of n arrays of type t, in one pass. Equals
// `fold` of all arrays and `step` bitwise. `in` may coincide with `outs`.
void reduce_step(DType t, const Update& update, const StepArrays& arrays, const void* const* in,
                 int n, size_t count, const Scale& scale, uint32_t taken,
                 const Execution& execution = {});

}  // namespace phub
