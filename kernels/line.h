// A line: what 64 bytes of an array on the wire hold, as accumulators in vector registers; the step
// in which the loops walk arrays.
// Included once by each instruction set's source file, which says how wide its registers are
// (PHUB_VECTOR_BYTES) and in which namespace this stands (PHUB_ISA).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/host_device.h"

namespace phub::PHUB_ISA {
namespace {

inline constexpr size_t kLineBytes = 64;

template <class T, size_t bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T>
using Vector = typename VectorOf<T, PHUB_VECTOR_BYTES>::type;

// The bits of one vector as another type of the same size.
template <class To, class From>
PHUB_HD To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, size_t lanes>
struct Line {
  static constexpr size_t parts = lanes * sizeof(T) / PHUB_VECTOR_BYTES;
  Vector<T> part[parts];
};

// Elements of a line of the wire.
template <class E>
inline constexpr size_t kLanes = kLineBytes / sizeof(typename E::Wire);

// What becomes one vector of accumulators, as it stands in memory.
template <class E>
using Stored = typename VectorOf<typename E::Wire, PHUB_VECTOR_BYTES * sizeof(typename E::Wire) /
                                                       sizeof(typename E::Acc)>::type;

// Reads a line of elements of type E.
template <class E, size_t lanes>
PHUB_HD Line<typename E::Acc, lanes> load(const char* from) {
  Line<typename E::Acc, lanes> line;
  for (size_t p = 0; p < line.parts; ++p) {
    Stored<E> stored;
    std::memcpy(&stored, from + p * sizeof stored, sizeof stored);
    line.part[p] = E::widen(stored);
  }
  return line;
}

// Writes a vector, aligned to its size, past the caches where the machine can.
template <class V>
PHUB_HD void write_past(char* to, V vector) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits<__m512i>(vector));
  else if constexpr (sizeof(V) == 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits<__m256i>(vector));
  else if constexpr (sizeof(V) == 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits<__m128i>(vector));
  else
    _mm_stream_si64(reinterpret_cast<long long*>(to), bits<long long>(vector));
#else
  std::memcpy(to, &vector, sizeof vector);
#endif
}

template <class E, size_t lanes>
PHUB_HD void store(char* to, bool streaming, const Line<typename E::Acc, lanes>& line) {
  for (size_t p = 0; p < line.parts; ++p) {
    const Stored<E> stored = E::narrow(line.part[p]);
    if (streaming)
      write_past(to + p * sizeof stored, stored);
    else
      std::memcpy(to + p * sizeof stored, &stored, sizeof stored);
  }
}

// The square root of each element, rounded correctly.
template <class V>
PHUB_HD V square_root(V x) {
#if defined(__x86_64__)
  constexpr bool narrow = sizeof(x[0]) == sizeof(float);
  if constexpr (sizeof(V) == 64 && narrow)
    return bits<V>(_mm512_sqrt_ps(bits<__m512>(x)));
  else if constexpr (sizeof(V) == 64)
    return bits<V>(_mm512_sqrt_pd(bits<__m512d>(x)));
  else if constexpr (sizeof(V) == 32 && narrow)
    return bits<V>(_mm256_sqrt_ps(bits<__m256>(x)));
  else if constexpr (sizeof(V) == 32)
    return bits<V>(_mm256_sqrt_pd(bits<__m256d>(x)));
  else if constexpr (narrow)
    return bits<V>(_mm_sqrt_ps(bits<__m128>(x)));
  else
    return bits<V>(_mm_sqrt_pd(bits<__m128d>(x)));
#else
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// Orders streamed stores before whatever tells another thread about them.
PHUB_HD void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Reads ahead into the second-level cache. Not into the first: chunks of different workers' arrays
// tend to start at the same offset of a page, so the lines of all arrays compete for one set of it.
// The distance was measured: 1 to 2 KiB make little difference, no prefetch costs up to a quarter.
template <size_t bytes>
PHUB_HD void prefetch(const char* from) {
  constexpr size_t kDistance = 1280;
  for (size_t b = 0; b < bytes; b += kLineBytes) __builtin_prefetch(from + kDistance + b, 0, 2);
}

}  // namespace
}  // namespace phub::PHUB_ISA
