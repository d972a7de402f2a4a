// Element types (how they stand in memory, in which type they are accumulated) and reductions, over
// vectors. Included as kernels/line.h is.
#pragma once

#include <cstdint>

#include "kernels/line.h"

namespace phub::PHUB_ISA {
namespace {

// Accumulated in itself.
template <class T>
struct Plain {
  using Wire = T;
  using Acc = T;
  static PHUB_HD Vector<T> widen(Vector<T> x) { return x; }
  static PHUB_HD Vector<T> narrow(Vector<T> x) { return x; }
};

// Any byte but 0 is true; only 1 is written.
struct Bool {
  using Wire = uint8_t;
  using Acc = uint8_t;
  static PHUB_HD Vector<uint8_t> widen(Vector<uint8_t> x) {
    return bits<Vector<uint8_t>>(x != 0) & 1;
  }
  static PHUB_HD Vector<uint8_t> narrow(Vector<uint8_t> x) { return x; }
};

// Bits of floats. Signed, as vectors of these are compared in one instruction; shifts to the right
// are of positive numbers only, or masked.
using Bits32 = Vector<int32_t>;
using Narrow16 = VectorOf<uint16_t, PHUB_VECTOR_BYTES / 2>::type;

PHUB_HD Vector<float> as_float(Bits32 x) { return bits<Vector<float>>(x); }
PHUB_HD Bits32 as_bits(Vector<float> x) { return bits<Bits32>(x); }
// The sign of each element where a 16-bit float has it.
PHUB_HD Bits32 sign16(Vector<float> x) { return (as_bits(x) >> 16) & 0x8000; }

// IEEE binary16, converted by one instruction or, where there is none, by integer arithmetic.
struct Half {
  using Wire = uint16_t;
  using Acc = float;

  static PHUB_HD Vector<float> widen(Narrow16 stored) {
#if defined(__x86_64__) && PHUB_VECTOR_BYTES == 64
    return _mm512_cvtph_ps(bits<__m256i>(stored));
#elif defined(__x86_64__) && PHUB_VECTOR_BYTES == 32
    return _mm256_cvtph_ps(bits<__m128i>(stored));
#else
    return widen_bits(stored);
#endif
  }

  static PHUB_HD Narrow16 narrow(Vector<float> value) {
#if defined(__x86_64__) && PHUB_VECTOR_BYTES == 64
    return bits<Narrow16>(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__x86_64__) && PHUB_VECTOR_BYTES == 32
    return bits<Narrow16>(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
    return narrow_bits(value);
#endif
  }

 private:
  static PHUB_HD Vector<float> widen_bits(Narrow16 stored) {
    const Bits32 x = __builtin_convertvector(stored, Bits32);
    const Bits32 magnitude = x & 0x7fff;
    // Exponent and mantissa moved to their places make a float that is too small by 2^112;
    // multiplying is exact, also for subnormals.
    const Bits32 finite = as_bits(as_float(magnitude << 13) * 0x1p112f);
    const Bits32 infinite = (magnitude << 13) | 0x7f800000 | ((magnitude > 0x7c00) & 0x00400000);
    const Bits32 is_finite = magnitude < 0x7c00;
    return as_float((is_finite ? finite : infinite) | ((x & 0x8000) << 16));
  }

  static PHUB_HD Narrow16 narrow_bits(Vector<float> value) {
    const Bits32 magnitude = as_bits(value) & 0x7fffffff;
    // Normal: a smaller bias, and rounding by adding half a unit, less one bit when even.
    const Bits32 normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal (below 2^-14): adding 0.5 makes the float addition round at the right bit.
    const Bits32 subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
    const Bits32 finite =
        (magnitude < 0x38800000) ? subnormal : normal;  // 65520.. carries to infinity
    const Bits32 nan = ((magnitude >> 13) & 0x3ff) | 0x7e00;
    const Bits32 infinite = (magnitude > 0x7f800000) ? nan : (magnitude & 0) | 0x7c00;
    const Bits32 result = (magnitude < 0x47800000) ? finite : infinite;  // from 2^16 on
    return __builtin_convertvector(result | sign16(value), Narrow16);
  }
};

// bfloat16: the upper half of a float.
struct Brain {
  using Wire = uint16_t;
  using Acc = float;

  static PHUB_HD Vector<float> widen(Narrow16 stored) {
    return as_float(__builtin_convertvector(stored, Bits32) << 16);
  }

  static PHUB_HD Narrow16 narrow(Vector<float> value) {
    const Bits32 magnitude = as_bits(value) & 0x7fffffff;
    const Bits32 rounded = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16;
    const Bits32 nan = (magnitude >> 16) | 0x40;
    const Bits32 result = (magnitude > 0x7f800000) ? nan : rounded;
    return __builtin_convertvector(result | sign16(value), Narrow16);
  }
};

struct Sum {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return a + b;
  }
};

struct Product {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return a * b;
  }
};

struct Or {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return a | b;
  }
};

struct And {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return a & b;
  }
};

// A NaN on either side is the result: on the left by the second test, on the right as the
// comparison with it is false.
struct Min {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <class V>
  static PHUB_HD V combine(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

}  // namespace
}  // namespace phub::PHUB_ISA
