// The loops for AVX-512. Fused multiply-add stays out (-ffp-contract=off): results are those of the
// other instruction sets, bitwise.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// After the standard headers, as their inline functions are shared with other files. All of ours
// that are used below are always inlined.
#pragma GCC target("f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
// gcc 12's own header initialises "undefined" vectors with themselves.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define PHUB_ISA avx512
#define PHUB_VECTOR_BYTES 64
#include "kernels/loops_impl.h"

namespace phub {

const Loops* loops_avx512() { return &avx512::kLoops; }

}  // namespace phub

#else

#include "kernels/loops.h"

namespace phub {

const Loops* loops_avx512() { return nullptr; }

}  // namespace phub

#endif
