// Element types and reductions, shared by the wire, the CPU loops and the CUDA kernels.
// Numbers are those of DType and ReduceOp in backends/base.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phub {

enum class DType : uint8_t {
  f32 = 0,
  f64 = 1,
  f16 = 2,
  bf16 = 3,
  i32 = 4,
  i64 = 5,
  u8 = 6,
  i8 = 7,
  b8 = 8
};
inline constexpr int kDTypes = 9;

enum class ReduceOp : uint8_t { sum = 0, average = 1, min = 2, max = 3, product = 4 };
inline constexpr int kReduceOps = 5;

constexpr size_t item_size(DType t) {
  constexpr size_t sizes[kDTypes] = {4, 8, 2, 2, 4, 8, 1, 1, 1};
  return sizes[static_cast<int>(t)];
}

// 16-bit floats are accumulated in fp32; every other type in itself.
constexpr DType accumulator_type(DType t) {
  return t == DType::f16 || t == DType::bf16 ? DType::f32 : t;
}

}  // namespace phub
