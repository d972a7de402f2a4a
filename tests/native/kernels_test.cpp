// The kernels on every instruction set of this machine: bitwise the same results, and no byte read
// or written outside of the arrays (each is allocated exactly, so that a sanitizer sees it).
#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "kernels/cpu.h"

using namespace phub;

namespace {

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i32,
                            DType::i64, DType::u8,  DType::i8,  DType::b8};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
constexpr size_t kCounts[] = {0, 1, 7, 16, 33, 64, 257, 1500};

// An array of its own on the heap, `offset` bytes behind an aligned address.
class Array {
 public:
  Array(size_t bytes, size_t offset) : memory_(offset + bytes), offset_(offset) {}
  std::byte* data() { return memory_.data() + offset_; }
  bool operator==(const Array& other) const {
    return std::equal(memory_.begin() + static_cast<long>(offset_), memory_.end(),
                      other.memory_.begin() + static_cast<long>(other.offset_),
                      other.memory_.end());
  }

 private:
  std::vector<std::byte> memory_;
  size_t offset_;
};

// Numbers in [1, 2): sums and products of a few stay normal in every type.
void fill(DType t, Array& array, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  for (size_t i = 0; i < count; ++i) {
    const float value = 1.0f + static_cast<float>(random() % 4096) / 4096.0f;
    const double wide = value;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t brain = static_cast<uint16_t>(bits >> 16);
    const uint16_t half = static_cast<uint16_t>(0x3c00 | (random() % 1024));
    const uint64_t number = (uint64_t{random()} << 32) | random();
    const void* from = &number;
    if (t == DType::f32) from = &value;
    if (t == DType::f64) from = &wide;
    if (t == DType::f16) from = &half;
    if (t == DType::bf16) from = &brain;
    std::memcpy(array.data() + i * item_size(t), from, item_size(t));
  }
}

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
    if (has_isa(isa)) found.push_back(isa);
  return found;
}

struct Inputs {
  Inputs(DType t, int n, size_t count) {
    for (int k = 0; k < n; ++k) {
      arrays.emplace_back(count * item_size(t), static_cast<size_t>(k) % 5);
      fill(t, arrays.back(), count, static_cast<uint32_t>(k));
    }
    for (Array& array : arrays) pointers.push_back(array.data());
  }
  std::vector<Array> arrays;
  std::vector<const void*> pointers;
};

Array reduced(DType t, ReduceOp op, Inputs& in, size_t count, const Scale& scale,
              const Execution& execution) {
  Array out(count * item_size(t), 1);
  void* to = out.data();
  reduce(t, op, &to, 1, in.pointers.data(), static_cast<int>(in.pointers.size()), count, scale,
         execution);
  return out;
}

struct Stepped {
  Array weights, out;
  std::vector<Array> state;
  bool operator==(const Stepped&) const = default;
};

const Update kUpdates[] = {SgdParams{0.1, 0.9, 0.0, 0.01, true, false},
                           AdamParams{0.1, 0.9, 0.99, 1e-8, 0.01, false, false, false},
                           AdamParams{0.1, 0.9, 0.99, 1e-8, 0.01, true, true, true}};

// Two steps of a double-buffered model.
Stepped stepped(DType t, const Update& update, Inputs& in, size_t count,
                const Execution& execution) {
  const size_t wide = item_size(accumulator_type(t));
  Array buffers[2] = {Array(count * wide, 4), Array(count * wide, 12)};
  Stepped result{Array(0, 0), Array(count * item_size(t), 2), {}};
  fill(accumulator_type(t), buffers[0], count, 99);
  for (int s = 0; s < state_arrays(update); ++s)
    result.state.emplace_back(count * wide, 8 * static_cast<size_t>(s) + 8);
  void* out = result.out.data();
  for (uint32_t step = 0; step < 2; ++step) {
    StepArrays arrays{buffers[step % 2].data(), buffers[1 - step % 2].data(), {}, &out, 1};
    for (size_t s = 0; s < result.state.size(); ++s) arrays.state[s] = result.state[s].data();
    reduce_step(t, update, arrays, in.pointers.data(), static_cast<int>(in.pointers.size()), count,
                {1.0, 0.25, 1}, step, execution);
  }
  result.weights = buffers[0];
  return result;
}

}  // namespace

TEST(reductions_are_the_same_on_every_isa) {
  for (DType t : kTypes)
    for (ReduceOp op : kOps)
      for (int n : {1, 3, 8, 11})
        for (size_t count : kCounts) {
          Inputs in(t, n, count);
          const Array expected =
              reduced(t, op, in, count, {1.0, 0.5, 1}, {Isa::baseline, Stores::cached});
          for (Isa isa : isas())
            for (Stores stores : {Stores::cached, Stores::streaming})
              CHECK(reduced(t, op, in, count, {1.0, 0.5, 1}, {isa, stores}) == expected);
        }
}

TEST(steps_are_the_same_on_every_isa) {
  for (const Update& update : kUpdates)
    for (DType t : {DType::f32, DType::f64, DType::f16, DType::bf16})
      for (int n : {1, 2, 8, 11})
        for (size_t count : kCounts) {
          Inputs in(t, n, count);
          const Stepped expected = stepped(t, update, in, count, {Isa::baseline, Stores::cached});
          for (Isa isa : isas())
            for (Stores stores : {Stores::cached, Stores::streaming})
              CHECK(stepped(t, update, in, count, {isa, stores}) == expected);
        }
}

TEST(one_call_equals_folding_and_finishing) {
  for (DType t : kTypes)
    for (ReduceOp op : kOps) {
      const size_t count = 1111;
      Inputs in(t, 9, count);
      const Scale scale{0.5, 0.25, 1};
      Array acc(count * item_size(accumulator_type(t)), 3), out(count * item_size(t), 1);
      for (size_t k = 0; k < in.pointers.size(); ++k)
        fold(t, op, acc.data(), in.pointers[k], count, k == 0, scale);
      finish(t, op, out.data(), acc.data(), count, scale);
      CHECK(out == reduced(t, op, in, count, scale, {}));
    }
}

TEST(integers_wrap_around) {
  const int8_t large[2] = {127, -128}, one[2] = {1, -1};
  const void* in[] = {large, one};
  int8_t sum[2];
  void* out = sum;
  reduce(DType::i8, ReduceOp::sum, &out, 1, in, 2, 2);
  CHECK_EQUAL(sum[0], -128);
  CHECK_EQUAL(sum[1], 127);
}

// One thread streams results, another one reads them when it is told: it must see them all.
TEST(streamed_results_are_there_when_published) {
  constexpr size_t kCount = 4096;
  Inputs in(DType::f32, 2, kCount);
  const Array expected = reduced(DType::f32, ReduceOp::sum, in, kCount, {}, {});
  std::vector<Array> results;
  for (int i = 0; i < 64; ++i) results.emplace_back(kCount * sizeof(float), 0);
  std::atomic<size_t> done{0};
  std::thread writer([&] {
    for (size_t i = 0; i < results.size(); ++i) {
      void* out = results[i].data();
      reduce(DType::f32, ReduceOp::sum, &out, 1, in.pointers.data(), 2, kCount, {},
             {best_isa(), Stores::streaming});
      done.store(i + 1, std::memory_order_release);
    }
  });
  for (size_t i = 0; i < results.size(); ++i) {
    while (done.load(std::memory_order_acquire) <= i) std::this_thread::yield();
    CHECK(results[i] == expected);
  }
  writer.join();
}

TEST(wrong_arguments_are_refused) {
  float one = 1;
  const void* in = &one;
  void* out = &one;
  const auto no_input =
      THROWN(std::invalid_argument, reduce(DType::f32, ReduceOp::sum, &out, 1, &in, 0, 1));
  CHECK_CONTAINS(no_input.what(), "at least one input and output, got 0 and 1");
  const StepArrays arrays{&one, &one, {}, nullptr, 0};
  const auto integers =
      THROWN(std::invalid_argument, step(DType::i32, SgdParams{}, arrays, &one, 1, {}, 0));
  CHECK_CONTAINS(integers.what(), "a floating type");
}

int main(int argc, char** argv) { return test::run(argc, argv); }
