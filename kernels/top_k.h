// The k elements of largest magnitude; see packed.h.
#pragma once

#include <cstddef>

namespace phub {

// Elements that are sent of `count`.
size_t top_k_kept(double share, size_t count);

void pack_top_k(void* out, void* residual, const void* gradient, size_t count, size_t k);
bool fold_top_k(void* acc, const void* form, size_t count, size_t k, bool first, float pre);

}  // namespace phub
