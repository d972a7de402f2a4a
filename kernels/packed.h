// Packed gradients: the forms in which a worker sends a chunk to a PBox, and from which a core
// folds it straight into its accumulator. Gradients and accumulators are fp32.
//
//   f16, bf16   every element rounded to 16 bits.
//   two_bit     MXNet's rule: what has reached +-threshold is sent as that, and taken off the
//               residual. Four elements a byte, the first one in its upper bits: 11 is +threshold,
//               10 is -threshold, 00 is 0; whole words of 16 elements.
//   one_bit     EF-SignSGD (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
//               Compression Schemes", 2019), with a scale per chunk as Zheng et al. have it
//               ("Communication-Efficient Distributed Blockwise Momentum SGD with
//               Error-Feedback", 2019). The scale, the mean magnitude, in fp32; then a bit an
//               element, the first one in the lowest bit, 1 where it is >= 0; whole words of 32.
//   top_k       the k elements of largest magnitude, with memory (Stich et al., "Sparsified SGD
//               with Memory", 2018). k 32-bit indices that rise, then their k values in fp32. Of
//               equal magnitudes the first ones are sent; NaN is above all.
//
// The last three keep a residual: it is added to the next gradient, and what is sent is taken off.
// Contract as in cpu.h: any count and alignment, from any thread, nothing allocated, and the
// results are those of kernels/packed_reference.py bitwise. One loop serves all instruction sets:
// with 128-bit vectors folding a packed gradient takes no longer than folding a plain one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phub {

// Numbers are those of Packing in backends/compression.py.
enum class Packing : uint8_t { none = 0, f16 = 1, bf16 = 2, two_bit = 3, one_bit = 4, top_k = 5 };

struct Compression {
  Packing packing = Packing::none;
  double parameter = 0.0;  // two_bit: the threshold; top_k: the share of elements that is sent

  bool packs() const { return packing != Packing::none; }
  bool has_residual() const { return packing >= Packing::two_bit; }
  // The packing exists; a threshold is positive and finite in fp32; a share is in (0, 1/2], as a
  // larger one would take more room than the gradient.
  bool is_valid() const;
};

// Bytes of the packed form of `count` elements: the form's length depends on nothing else.
size_t packed_bytes(const Compression& compression, size_t count);

// Writes the packed form of `gradient` to `out`. `residual`: read and written, or unused.
void pack(const Compression& compression, void* out, void* residual, const void* gradient,
          size_t count);

// acc += pre * what the packed form stands for; the first form sets acc. False: it names an element
// that is not there, or one twice; acc then holds a part of it, and nothing else was written. The
// form may be changed by another process meanwhile.
[[nodiscard]] bool fold_packed(const Compression& compression, void* acc, const void* form,
                               size_t count, bool first, double pre);

}  // namespace phub
