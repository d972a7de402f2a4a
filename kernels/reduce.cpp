// Reductions: sums of floats in one pass over all arrays where possible, all else strip by strip.
#include <cstring>

#include "kernels/passes.h"

namespace phub {
namespace {

// Floor division by a positive number.
template <class T>
void divide(void* array, size_t count, int divisor) {
  char* at = static_cast<char*>(array);
  for (size_t i = 0; i < count; ++i, at += sizeof(T)) {
    T value;
    std::memcpy(&value, at, sizeof value);
    const int64_t x = value;
    const int64_t quotient = x / divisor - (x % divisor < 0 ? 1 : 0);
    value = static_cast<T>(quotient);
    std::memcpy(at, &value, sizeof value);
  }
}

void divide(DType t, void* array, size_t count, int divisor) {
  switch (t) {
    case DType::i32:
      return divide<int32_t>(array, count, divisor);
    case DType::i64:
      return divide<int64_t>(array, count, divisor);
    case DType::u8:
      return divide<uint8_t>(array, count, divisor);
    case DType::i8:
      return divide<int8_t>(array, count, divisor);
    default:
      refuse("average", "a numeric type, got bool");
  }
}

bool divides(DType t, ReduceOp op, const Scale& scale) {
  if (op != ReduceOp::average || is_floating(t)) return false;
  if (scale.divisor < 1) refuse("average", "a divisor >= 1, got " + std::to_string(scale.divisor));
  return scale.divisor != 1;
}

}  // namespace

void require_arrays(const char* function, int n, int n_out) {
  if (n < 1 || n_out < 1)
    refuse(function, "at least one input and output, got " + std::to_string(n) + " and " +
                         std::to_string(n_out));
}

void accumulate(Loops::Accumulate loop, DType t, const Inputs& in, size_t begin, size_t count,
                double pre, Strip& strip) {
  for (int from = 0; from < in.n; from += kStreams)
    run(loop, t, strip.data(), View(in, from, begin), count, from == 0, pre);
}

void write_out(const Loops& loops, DType t, void* const* outs, int n_out, const Inputs& read,
               size_t begin, size_t count, const void* acc, double post, Stores stores) {
  const View view({&acc, 1, item_size(accumulator_type(t))}, 0, 0);
  for (int o = 0; o < n_out;) {
    Destinations to(t, begin);
    for (; o < n_out && !to.full(); ++o)
      to.add(outs[o], stores == Stores::streaming && !read.contain(outs[o]));
    run(loops.narrow[static_cast<int>(t)], t, to.targets(), view, count, post);
  }
}

void reduce(DType t, ReduceOp op, void* const* outs, int n_out, const void* const* in, int n,
            size_t count, const Scale& scale, const Execution& execution) {
  require_arrays("reduce", n, n_out);
  const Loops& loops = loops_of(execution);
  const int row = static_cast<int>(t), column = op_column(op);
  const bool is_sum = is_floating(t) && column == 0;
  const Inputs inputs{in, n, item_size(t)};
  const bool divided = divides(t, op, scale);
  if (is_sum && n <= kStreams && n_out <= kTargets && scale.pre == 1.0) {
    Destinations to(t, 0);
    for (int o = 0; o < n_out; ++o)
      to.add(outs[o], execution.stores == Stores::streaming && !inputs.contain(outs[o]));
    run(loops.sum[row], t, to.targets(), View(inputs, 0, 0), count, scale.post);
    return;
  }
  Strip strip(t);
  for (size_t begin = 0; begin < count; begin += strip.count) {
    const size_t size = std::min(strip.count, count - begin);
    accumulate(loops.accumulate[row][column], t, inputs, begin, size, scale.pre, strip);
    if (divided) divide(t, strip.data(), size, scale.divisor);
    write_out(loops, t, outs, n_out, inputs, begin, size, strip.data(), scale.post,
              execution.stores);
  }
}

void fold(DType t, ReduceOp op, void* acc, const void* in, size_t count, bool first,
          const Scale& scale, const Execution& execution) {
  const auto loop = loops_of(execution).accumulate[static_cast<int>(t)][op_column(op)];
  run(loop, t, acc, View({&in, 1, item_size(t)}, 0, 0), count, first, scale.pre);
}

void copy(void* out, const void* in, size_t bytes, const Execution& execution) {
  if (execution.stores == Stores::cached) {
    std::memcpy(out, in, bytes);
    return;
  }
  const Inputs inputs{&in, 1, 1};
  write_out(loops_of(execution), DType::u8, &out, 1, inputs, 0, bytes, in, 1.0, execution.stores);
}

void finish(DType t, ReduceOp op, void* out, const void* acc, size_t count, const Scale& scale,
            const Execution& execution) {
  const bool divided = divides(t, op, scale);
  const Inputs inputs{&acc, 1, item_size(accumulator_type(t))};
  write_out(loops_of(execution), t, &out, 1, inputs, 0, count, acc, scale.post, execution.stores);
  if (divided) divide(t, out, count, scale.divisor);
}

}  // namespace phub
