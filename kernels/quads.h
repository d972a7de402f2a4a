// Four floats at a time, at any address: the step in which gradients are packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace phub {

inline constexpr size_t kQuad = 4;  // elements
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadBits __attribute__((vector_size(16)));  // also what comparing gives: 0 or -1

// Calls body(first element, elements) for each four of `count` elements, their number compiled in,
// and for those that are left.
template <class Body>
inline void each_quad(size_t count, const Body& body) {
  const size_t whole = count / kQuad * kQuad;
  for (size_t at = 0; at < whole; at += kQuad) body(at, std::integral_constant<size_t, kQuad>());
  if (whole < count) body(whole, count - whole);
}

// Elements [at, at + n) of an array of floats, behind them zeros.
inline Quad load_quad(const void* array, size_t at, size_t n) {
  Quad quad{};
  std::memcpy(&quad, static_cast<const char*>(array) + at * sizeof(float), n * sizeof(float));
  return quad;
}

inline void store_quad(void* array, size_t at, size_t n, Quad quad) {
  std::memcpy(static_cast<char*>(array) + at * sizeof(float), &quad, n * sizeof(float));
}

// The four numbers as one, where each has bits of its own.
inline int32_t merged(QuadBits bits) { return bits[0] | bits[1] | bits[2] | bits[3]; }

}  // namespace phub
