#include "kernels/packed.h"

#include <array>
#include <cmath>
#include <limits>

#include "kernels/cpu.h"
#include "kernels/passes.h"
#include "kernels/quads.h"
#include "kernels/top_k.h"

namespace phub {
namespace {

constexpr size_t kWord = sizeof(uint32_t);

// Bytes of whole words that hold `each` elements.
constexpr size_t word_bytes(size_t count, size_t each) { return (count + each - 1) / each * kWord; }

// acc += value * unit(q) for the q-th four elements.
template <class Unit>
void fold_units(void* acc, size_t count, bool first, float value, const Unit& unit) {
  each_quad(count, [&](size_t at, auto n) {
    const Quad before = first ? Quad{} : load_quad(acc, at, n);
    store_quad(acc, at, n, before + unit(at / kQuad) * value);
  });
}

template <size_t codes>
using Units = std::array<std::array<float, kQuad>, codes>;

template <size_t codes>
Quad unit_of(const Units<codes>& units, size_t code) {
  return load_quad(units[code].data(), 0, kQuad);
}

// --- 2 bits ---

constexpr Units<256> make_two_bit_units() {
  constexpr float kMeaning[] = {0, 0, -1, 1};
  Units<256> units{};
  for (size_t code = 0; code < units.size(); ++code)
    for (size_t i = 0; i < kQuad; ++i) units[code][i] = kMeaning[(code >> (6 - 2 * i)) & 3];
  return units;
}

alignas(64) constexpr Units<256> kTwoBitUnits = make_two_bit_units();

void pack_two_bit(void* out, void* residual, const void* gradient, size_t count, float threshold) {
  constexpr QuadBits kUp = {0xc0, 0x30, 0x0c, 0x03}, kDown = {0x80, 0x20, 0x08, 0x02};
  auto* const bytes = static_cast<uint8_t*>(out);
  std::memset(out, 0, word_bytes(count, 16));
  const Quad plus = Quad{} + threshold;
  each_quad(count, [&](size_t at, auto n) {
    const Quad sum = load_quad(residual, at, n) + load_quad(gradient, at, n);
    const QuadBits up = sum >= plus, down = sum <= -plus;
    const Quad sent = up ? plus : (down ? -plus : Quad{});
    store_quad(residual, at, n, sum - sent);
    bytes[at / kQuad] = static_cast<uint8_t>(merged((up & kUp) | (down & kDown)));
  });
}

void fold_two_bit(void* acc, const void* form, size_t count, bool first, float value) {
  const auto* const bytes = static_cast<const uint8_t*>(form);
  fold_units(acc, count, first, value,
             [&](size_t quad) { return unit_of(kTwoBitUnits, bytes[quad]); });
}

// --- 1 bit ---

constexpr Units<16> make_one_bit_units() {
  Units<16> units{};
  for (size_t code = 0; code < units.size(); ++code)
    for (size_t i = 0; i < kQuad; ++i) units[code][i] = (code >> i) & 1 ? 1 : -1;
  return units;
}

alignas(64) constexpr Units<16> kOneBitUnits = make_one_bit_units();

// residual += gradient; returns its mean magnitude, summed in double in four columns.
float add_and_average(void* residual, const void* gradient, size_t count) {
  double columns[kQuad] = {};
  each_quad(count, [&](size_t at, auto n) {
    const Quad sum = load_quad(residual, at, n) + load_quad(gradient, at, n);
    store_quad(residual, at, n, sum);
    for (size_t i = 0; i < kQuad; ++i) columns[i] += std::fabs(double(sum[i]));
  });
  const double total = columns[0] + columns[1] + columns[2] + columns[3];
  return count == 0 ? 0.0f : static_cast<float>(total / double(count));
}

void pack_one_bit(void* out, void* residual, const void* gradient, size_t count) {
  constexpr QuadBits kBits = {1, 2, 4, 8};
  const float scale = add_and_average(residual, gradient, count);
  std::memcpy(out, &scale, sizeof scale);
  auto* const bytes = static_cast<uint8_t*>(out) + sizeof scale;
  std::memset(bytes, 0, word_bytes(count, 32));
  const Quad plus = Quad{} + scale;
  each_quad(count, [&](size_t at, auto n) {
    const Quad sum = load_quad(residual, at, n);
    const QuadBits positive = sum >= Quad{};
    store_quad(residual, at, n, sum - (positive ? plus : -plus));
    const int32_t code = merged(positive & kBits) & ((1 << n) - 1);
    bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] | (code << (at % 8)));
  });
}

void fold_one_bit(void* acc, const void* form, size_t count, bool first, float pre) {
  float scale;
  std::memcpy(&scale, form, sizeof scale);
  const auto* const bytes = static_cast<const uint8_t*>(form) + sizeof scale;
  fold_units(acc, count, first, scale * pre, [&](size_t quad) {
    return unit_of(kOneBitUnits, (bytes[quad / 2] >> (quad % 2 * kQuad)) & 15);
  });
}

DType cast_type(Packing packing) { return packing == Packing::f16 ? DType::f16 : DType::bf16; }

}  // namespace

bool Compression::is_valid() const {
  const float threshold = static_cast<float>(parameter);
  switch (packing) {
    case Packing::two_bit:
      return threshold > 0 && threshold <= std::numeric_limits<float>::max();
    case Packing::top_k:
      return parameter > 0 && parameter <= 0.5;
    default:
      return packing < Packing::two_bit || packing == Packing::one_bit;
  }
}

size_t packed_bytes(const Compression& compression, size_t count) {
  switch (compression.packing) {
    case Packing::none:
      return count * sizeof(float);
    case Packing::two_bit:
      return word_bytes(count, 16);
    case Packing::one_bit:
      return sizeof(float) + word_bytes(count, 32);
    case Packing::top_k:
      return top_k_kept(compression.parameter, count) * (sizeof(uint32_t) + sizeof(float));
    default:
      return count * item_size(cast_type(compression.packing));
  }
}

void pack(const Compression& compression, void* out, void* residual, const void* gradient,
          size_t count) {
  const double parameter = compression.parameter;
  switch (compression.packing) {
    case Packing::none:
      return refuse("pack", "a packing, got none");
    case Packing::two_bit:
      return pack_two_bit(out, residual, gradient, count, static_cast<float>(parameter));
    case Packing::one_bit:
      return pack_one_bit(out, residual, gradient, count);
    case Packing::top_k:
      return pack_top_k(out, residual, gradient, count, top_k_kept(parameter, count));
    default:
      finish(cast_type(compression.packing), ReduceOp::sum, out, gradient, count);
  }
}

bool fold_packed(const Compression& compression, void* acc, const void* form, size_t count,
                 bool first, double pre) {
  const double parameter = compression.parameter;
  const float factor = static_cast<float>(pre);
  switch (compression.packing) {
    case Packing::none:
      refuse("fold_packed", "a packing, got none");
    case Packing::two_bit:
      fold_two_bit(acc, form, count, first, static_cast<float>(parameter) * factor);
      return true;
    case Packing::one_bit:
      fold_one_bit(acc, form, count, first, factor);
      return true;
    case Packing::top_k:
      return fold_top_k(acc, form, count, top_k_kept(parameter, count), first, factor);
    default:
      fold(cast_type(compression.packing), ReduceOp::sum, acc, form, count, first, {pre, 1.0, 1});
      return true;
  }
}

}  // namespace phub
