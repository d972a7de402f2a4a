// How a call is cut into passes that the loops can do: which arrays each pass reads and writes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/cpu.h"
#include "kernels/loops.h"

namespace phub {

const Loops& loops_of(const Execution& execution);

[[noreturn]] void refuse(const std::string& function, const std::string& expected_and_got);
void require_arrays(const char* function, int n, int n_out);

inline bool is_floating(DType t) { return static_cast<int>(t) < Loops::kFloats; }

// An average is a sum, and a factor or divisor.
constexpr int op_column(ReduceOp op) {
  constexpr int columns[kReduceOps] = {0, 0, 1, 2, 3};
  return columns[static_cast<int>(op)];
}

inline void* advance(void* array, size_t bytes) { return static_cast<char*>(array) + bytes; }
inline const void* advance(const void* array, size_t bytes) {
  return static_cast<const char*>(array) + bytes;
}

// An accumulator that stays in the first-level cache, for work that does not fit one pass.
class Strip {
 public:
  explicit Strip(DType t) : count(sizeof bytes_ / item_size(accumulator_type(t))) {}
  void* data() { return bytes_; }
  const size_t count;  // elements

 private:
  alignas(64) std::byte bytes_[4096];
};

// The arrays that a call reads.
struct Inputs {
  const void* const* array;
  int n;
  size_t item;  // bytes of an element

  bool contain(const void* one) const { return std::find(array, array + n, one) != array + n; }
};

// As many of the inputs as one pass reads, from input `from` and element `begin` on.
struct View {
  View(const Inputs& in, int from, size_t begin)
      : n(std::min(kStreams, in.n - from)), item(in.item) {
    for (int k = 0; k < n; ++k) array[k] = advance(in.array[from + k], begin * item);
  }
  View at(size_t begin) const { return View({array, n, item}, 0, begin); }

  const void* array[kStreams];
  int n;
  size_t item;
};

// The destinations of one pass: arrays of type t, from element `begin` on.
class Destinations {
 public:
  Destinations(DType t, size_t begin) : item_(item_size(t)), begin_(begin) {}

  bool full() const { return targets_.n == kTargets; }
  const Targets& targets() const { return targets_; }

  // `streaming` is a wish: all streamed arrays must lie alike in their lines of 64 bytes.
  void add(void* array, bool streaming) {
    constexpr size_t kLine = 64;
    void* at = advance(array, begin_ * item_);
    const size_t before_line = -reinterpret_cast<uintptr_t>(at) % kLine;
    if (streaming && !targets_.any_streaming && before_line % item_ == 0) {
      targets_.any_streaming = true;
      targets_.head = before_line / item_;
    }
    targets_.streaming[targets_.n] =
        streaming && targets_.any_streaming && before_line == targets_.head * item_;
    targets_.array[targets_.n++] = at;
  }

 private:
  const size_t item_, begin_;
  Targets targets_{};
};

// The loops for any number of elements. t: the type on the wire.
void run(Loops::Accumulate loop, DType t, void* acc, const View& in, size_t count, bool first,
         double pre);
void run(Loops::Sum loop, DType t, const Targets& out, const View& in, size_t count, double post);
void run(Loops::Step loop, DType t, const StepPass& pass, const Targets& out, const View& in,
         size_t count);

// The sum (or other reduction) of elements [begin, begin + count) of all inputs.
void accumulate(Loops::Accumulate loop, DType t, const Inputs& in, size_t begin, size_t count,
                double pre, Strip& strip);

// Writes post * acc, which holds elements [begin, begin + count), to all of `outs`; `read`: arrays
// that the call reads too.
void write_out(const Loops& loops, DType t, void* const* outs, int n_out, const Inputs& read,
               size_t begin, size_t count, const void* acc, double post, Stores stores);

}  // namespace phub
