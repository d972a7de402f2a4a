// The loops for AVX2. Fused multiply-add stays out (-ffp-contract=off): results are those of the
// other instruction sets, bitwise.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// After the standard headers, as their inline functions are shared with other files. All of ours
// that are used below are always inlined.
#pragma GCC target("avx2,f16c")
#define PHUB_ISA avx2
#define PHUB_VECTOR_BYTES 32
#include "kernels/loops_impl.h"

namespace phub {

const Loops* loops_avx2() { return &avx2::kLoops; }

}  // namespace phub

#else

#include "kernels/loops.h"

namespace phub {

const Loops* loops_avx2() { return nullptr; }

}  // namespace phub

#endif
