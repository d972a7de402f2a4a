#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/quads.h"

namespace phub {
namespace {

constexpr size_t kIndexBytes = sizeof(uint32_t);

template <class T>
T read(const void* array, size_t at) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + at * sizeof value, sizeof value);
  return value;
}

template <class T>
void write(void* array, size_t at, T value) {
  std::memcpy(static_cast<char*>(array) + at * sizeof value, &value, sizeof value);
}

// The bits of a float without its sign have the order of magnitudes.
uint32_t magnitude(const void* array, size_t at) { return read<uint32_t>(array, at) & 0x7fffffff; }

// The smallest magnitude that is sent, and how many of those that have it.
struct Cut {
  uint32_t magnitude;
  size_t equal;
};

// By radix: each pass finds some more bits of the k-th largest magnitude, from above.
Cut find_cut(const void* values, size_t count, size_t k) {
  struct Digit {
    int shift, bits;
  };
  constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
  Cut cut{0, k};
  uint32_t known = 0;  // the bits that are found
  for (const Digit digit : kDigits) {
    const uint32_t mask = (1u << digit.bits) - 1;
    std::array<size_t, 1 << 11> having{};
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = magnitude(values, i);
      if ((bits & known) == cut.magnitude) ++having[(bits >> digit.shift) & mask];
    }
    uint32_t value = mask;
    while (having[value] < cut.equal) cut.equal -= having[value--];
    cut.magnitude |= value << digit.shift;
    known |= mask << digit.shift;
  }
  return cut;
}

}  // namespace

size_t top_k_kept(double share, size_t count) {
  return std::min(count, std::max<size_t>(1, static_cast<size_t>(share * double(count))));
}

void pack_top_k(void* out, void* residual, const void* gradient, size_t count, size_t k) {
  if (k == 0) return;
  each_quad(count, [&](size_t at, auto n) {
    store_quad(residual, at, n, load_quad(residual, at, n) + load_quad(gradient, at, n));
  });
  Cut cut = find_cut(residual, count, k);
  void* const values = static_cast<char*>(out) + k * kIndexBytes;
  size_t sent = 0;
  for (size_t i = 0; i < count && sent < k; ++i) {
    const uint32_t bits = magnitude(residual, i);
    if (bits < cut.magnitude) continue;
    if (bits == cut.magnitude) {
      if (cut.equal == 0) continue;
      --cut.equal;
    }
    write(out, sent, static_cast<uint32_t>(i));
    write(values, sent++, read<float>(residual, i));
    write(residual, i, 0.0f);
  }
}

bool fold_top_k(void* acc, const void* form, size_t count, size_t k, bool first, float pre) {
  if (first) std::memset(acc, 0, count * sizeof(float));
  const void* const values = static_cast<const char*>(form) + k * kIndexBytes;
  size_t least = 0;
  for (size_t at = 0; at < k; ++at) {
    uint32_t index = read<uint32_t>(form, at);
    asm volatile("" : "+r"(index));  // never read again: its writer may change it after the check
    if (index < least || index >= count) return false;
    least = size_t{index} + 1;
    write(acc, index, read<float>(acc, index) + read<float>(values, at) * pre);
  }
  return true;
}

}  // namespace phub
