// Packed gradients: no byte read or written outside of the arrays (each is allocated exactly, so
// that a sanitizer sees it), and the way through a PBox and back.
#include <cmath>
#include <random>

#include "kernels/packed.h"
#include "pbox_box.h"

using namespace test;

namespace {

constexpr size_t kCounts[] = {0, 1, 3, 4, 5, 15, 16, 17, 32, 33, 257, 1500};
const Compression kCompressions[] = {
    {Packing::f16},     {Packing::bf16},        {Packing::two_bit, 0.75},
    {Packing::one_bit}, {Packing::top_k, 0.05}, {Packing::top_k, 0.5},
};

// An array of its own on the heap, `offset` bytes behind an aligned address.
class Array {
 public:
  explicit Array(size_t bytes, size_t offset = 1) : memory_(offset + bytes), offset_(offset) {}
  explicit Array(const Floats& values) : Array(values.size() * sizeof(float)) {
    if (!values.empty()) std::memcpy(data(), values.data(), values.size() * sizeof(float));
  }
  std::byte* data() { return memory_.data() + offset_; }
  float operator[](size_t index) {
    float value;
    std::memcpy(&value, data() + index * sizeof value, sizeof value);
    return value;
  }

 private:
  std::vector<std::byte> memory_;
  size_t offset_;
};

Floats randoms(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

// Two workers' forms of three steps: what the core has added up and the residuals are all that was
// given.
TEST(what_arrives_and_what_is_left_are_the_gradients) {
  for (const Compression& compression : kCompressions)
    for (const size_t count : kCounts) {
      Array left[] = {Array(Floats(count)), Array(Floats(count))}, acc(count * sizeof(float), 3);
      Array form(packed_bytes(compression, count), 5);
      Floats given(count);
      for (uint32_t step = 0; step < 6; ++step) {
        const Floats gradient = randoms(count, step);
        Array at(gradient);
        pack(compression, form.data(), left[step % 2].data(), at.data(), count);
        CHECK(fold_packed(compression, acc.data(), form.data(), count, step == 0, 1.0));
        for (size_t i = 0; i < count; ++i) given[i] += gradient[i];
      }
      const float tolerance = compression.has_residual() ? 1e-4f : 0.1f;
      for (size_t i = 0; i < count; ++i) {
        const float found = acc[i] + left[0][i] + left[1][i];
        CHECK(std::abs(found - given[i]) < tolerance);
      }
    }
}

TEST(a_form_is_as_long_as_the_count_says) {
  CHECK_EQUAL(packed_bytes({Packing::two_bit, 1.0}, 17), 8u);
  CHECK_EQUAL(packed_bytes({Packing::one_bit}, 33), 12u);
  CHECK_EQUAL(packed_bytes({Packing::top_k, 0.1}, 8192), 8u * 819);
  CHECK_EQUAL(packed_bytes({Packing::top_k, 0.1}, 3), 8u);
  CHECK_EQUAL(packed_bytes({Packing::bf16}, 3), 6u);
}

TEST(parameters_are_checked) {
  const double infinity = HUGE_VAL;
  for (const Compression& wrong :
       {Compression{Packing::two_bit, 0.0}, Compression{Packing::two_bit, infinity},
        Compression{Packing::two_bit, 1e-60}, Compression{Packing::top_k, 0.51},
        Compression{Packing::top_k, 0.0}, Compression{static_cast<Packing>(6), 0.0}}) {
    CHECK(!wrong.is_valid());
    TableInfo info = table_of({{10}}, 1);
    info.compression = wrong;
    CHECK_CONTAINS(THROWN(Error, info.check()).what(), "a known packing");
  }
  for (const Compression& right : kCompressions) CHECK(right.is_valid());
}

TEST(tables_that_cannot_be_packed_are_refused) {
  const auto refused = [](auto change) {
    TableInfo info = table_of({{10}, {4}}, 1);
    info.compression = {Packing::one_bit};
    info.check();
    change(info);
    CHECK_CONTAINS(THROWN(Error, info.check()).what(), "a known packing");
  };
  refused([](TableInfo& info) { info.arena = true; });
  refused([](TableInfo& info) { info.shared_answers = true; });
  refused([](TableInfo& info) { info.shared = true; });
  refused([](TableInfo& info) { info.op = ReduceOp::max; });
  refused([](TableInfo& info) { info.keys[1].dtype = DType::i32; });
  refused([](TableInfo& info) { info.keys[1].dtype = DType::bf16; });
}

// Each worker's gradient is +-1 with a threshold of 1, so that nothing is left.
TEST(packed_pushes_are_summed_over_both_transports) {
  for (const Transport& transport : {Transport{"tcp"}, Transport{"shm", false}}) {
    Box box(2);
    auto ranks = box.job(1, 3, transport);
    TableInfo info = table_of({{5000}, {0}, {7}}, 2);
    info.compression = {Packing::two_bit, 1.0};
    box.table(1, ranks, info);
    together(3, [&](int rank) {
      Worker& worker = *ranks[static_cast<size_t>(rank)];
      Floats memory(info.bytes / sizeof(float), 2.0f + static_cast<float>(rank));
      const uint8_t init = rank == 0 ? flag::init : flag::init | flag::no_grad;
      push_all(worker, info, init, memory);
      wait_all(worker, 1);
      CHECK_EQUAL(memory[4999], 2.0f);  // the root's, as they are
      for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < memory.size(); ++i) memory[i] = i % 3 ? 1.0f : -1.0f;
        const bool gone = step == 1 && rank == 2;
        push_all(worker, info, gone ? flag::no_grad : 0, memory);
        wait_all(worker, 1);
        const float all = step == 1 ? 2 : 3;
        for (size_t i = 0; i < 5000; ++i) CHECK_EQUAL(memory[i], i % 3 ? all : -all);
      }
    });
  }
}

// Its forms are sent from memory of the table, which must live on until they have left.
TEST(a_table_may_be_dropped_while_packed_gradients_are_under_way) {
  Box box(1);
  auto ranks = box.job(1, 2, {"tcp"});
  TableInfo info = table_of({{1 << 20}}, 1);
  info.compression = {Packing::bf16};
  box.table(1, ranks, info);
  Floats memory(info.bytes / sizeof(float)), other(memory);
  ranks[0]->client.push(1, 0, 0, at(memory, info, 0));
  ranks[0]->client.drop(1);
  ranks[1]->client.push(1, 0, 0, at(other, info, 0));
  wait_all(*ranks[1], 1);
  ranks[0]->client.close();
}

int main(int argc, char** argv) { return test::run(argc, argv); }
