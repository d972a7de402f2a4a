// Plans, and operations that run them: on a network of queues, whose order is random, without
// threads or sockets.
#include "operation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "plans.h"

using namespace test;

namespace {

constexpr size_t kFrame = 48;  // bytes: transfers take several frames

struct Message {
  uint32_t part;
  std::vector<std::byte> bytes;
};

// All ranks of one operation. Messages between a pair keep their order, all else is random.
class Network {
 public:
  Network(int size, const Spec& spec, PlanMaker maker, unsigned seed, size_t window = 3)
      : size_(size), spec_(spec), random_(seed) {
    const size_t parts = spec.count ? (spec.count + spec.part_count - 1) / spec.part_count : 1;
    const size_t last = spec.count - (parts - 1) * spec.part_count;
    for (int rank = 0; rank < size; ++rank) {
      buffers.emplace_back(spec.count * item_size(spec.dtype));
      ends_.push_back(std::make_unique<End>(*this, rank));
    }
    for (int rank = 0; rank < size; ++rank)
      operations.push_back(std::make_unique<Operation>(
          "test", 0, 0, spec, size, buffers[static_cast<size_t>(rank)].data(),
          Operation::Plans{parts > 1 ? maker(rank, size, spec.part_count) : nullptr,
                           maker(rank, size, last)},
          window, *ends_[static_cast<size_t>(rank)]));
  }

  void run() {
    for (auto& operation : operations) operation->confirm();
    while (std::any_of(operations.begin(), operations.end(),
                       [](const auto& o) { return !o->settled(); })) {
      const auto at = std::uniform_int_distribution<size_t>(0, operations.size() - 1)(random_);
      if (random_() % 4 == 0) operations[at]->advance();
      deliver();
      CHECK(++rounds_ < 10000000);
    }
    for (const auto& [pair, queue] : queues_) CHECK(queue.empty());
  }

  void deliver() {
    std::vector<std::pair<int, int>> ready;
    for (const auto& [pair, queue] : queues_)
      if (!queue.empty()) ready.push_back(pair);
    if (ready.empty()) return;
    const auto [from, to] = ready[random_() % ready.size()];
    const Message message = std::move(queues_[{from, to}].front());
    queues_[{from, to}].pop_front();
    Operation& operation = *operations[static_cast<size_t>(to)];
    std::byte* place = operation.destination(from, message.part, message.bytes.size());
    const std::byte* payload = message.bytes.data();
    if (place) {
      std::copy(message.bytes.begin(), message.bytes.end(), place);
      operation.placed();
      payload = place;
    }
    operation.receive(from, message.part, payload, message.bytes.size());
  }

  template <class T>
  T* data(int rank) {
    return reinterpret_cast<T*>(buffers[static_cast<size_t>(rank)].data());
  }

  std::vector<std::vector<std::byte>> buffers;
  std::vector<std::unique_ptr<Operation>> operations;
  size_t bytes_sent = 0;

 private:
  struct End : Carrier {
    End(Network& network, int rank) : network(network), rank(rank) {}
    bool may_send(const Operation&, int, size_t) override { return network.random_() % 3 != 0; }
    void send(const Operation&, int peer, uint32_t part, const std::byte* data, size_t bytes,
              size_t*) override {
      network.bytes_sent += bytes;
      for (size_t at = 0; at < bytes; at += kFrame)
        network.queues_[{rank, peer}].push_back(
            {part, {data + at, data + std::min(bytes, at + kFrame)}});
    }
    Network& network;
    int rank;
  };

  const int size_;
  const Spec spec_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<End>> ends_;
  std::map<std::pair<int, int>, std::deque<Message>> queues_;
  size_t rounds_ = 0;
};

Spec floats(size_t count, size_t part_count, ReduceOp op = ReduceOp::sum) {
  Spec spec;
  spec.op = op;
  spec.count = count;
  spec.part_count = part_count;
  return spec;
}

uint16_t bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

TEST(a_plan_knows_where_results_are_made) {
  const auto plan = ring_plan(0, 3, 9);  // ends with the sum of piece 1
  CHECK_EQUAL(plan->owned().size(), size_t{1});
  CHECK_EQUAL(plan->owned()[0].begin, size_t{3});
  CHECK_EQUAL(plan->owned()[0].end, size_t{6});
  CHECK_EQUAL(plan->finish_at(), size_t{2});
  const bool expected[] = {false, false, true, true};
  for (size_t i = 0; i < 4; ++i) CHECK_EQUAL(plan->sends_result(i), expected[i]);
  CHECK(plan->receivers() == std::vector<int>{1} && plan->senders() == std::vector<int>{2});
  CHECK(chain_plan(1, 3, 5)->owned().empty());
  CHECK(chain_plan(1, 3, 5)->sends_result(1));
  CHECK(ring_plan(0, 1, 5)->owned().size() == 1 && ring_plan(0, 1, 5)->finish_at() == 0);
  CHECK(ring_plan(0, 3, 0)->owned().empty());
}

TEST(impossible_plans_are_refused) {
  const auto refused = [](std::vector<Step> steps, bool reduces) {
    const Error error = THROWN(Error, Plan(10, steps, reduces));
    CHECK(error.code == ErrorCode::config);
  };
  refused({{1, {0, 11}, kNobody, {}, false}}, true);                 // outside
  refused({{1, {5, 5}, kNobody, {}, false}}, true);                  // empty
  refused({{-2, {0, 5}, kNobody, {}, false}}, true);                 // no rank
  refused({{kNobody, {}, 1, {0, 5}, true}}, false);                  // reduces
  refused({{kNobody, {}, 1, {0, 5}, true}, {1, {0, 10}, 1, {5, 10}, false}}, true);  // a mixture
  refused({{1, {0, 5}, 1, {0, 5}, false}}, false);                   // sends what it has not
}

TEST(allreduce_in_any_order_of_arrival) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const int sizes[] = {1, 2, 3, 4, 8};
    const int size = sizes[random() % 5];
    const bool power = (size & (size - 1)) == 0;
    const PlanMaker maker = power && seed % 2 ? halving_plan : ring_plan;
    const size_t count = random() % 400, part = 1 + random() % 150;
    Network network(size, floats(count, part), maker, seed, 1 + random() % 4);
    for (int rank = 0; rank < size; ++rank)
      for (size_t i = 0; i < count; ++i)
        network.data<float>(rank)[i] = static_cast<float>(i % 50 + static_cast<size_t>(rank));
    network.run();
    for (int rank = 0; rank < size; ++rank)
      for (size_t i = 0; i < count; ++i)
        CHECK_EQUAL(network.data<float>(rank)[i],
                    static_cast<float>((i % 50) * static_cast<size_t>(size)) +
                        static_cast<float>(size * (size - 1)) / 2);
  }
}

TEST(scales_are_applied_once) {
  Spec spec = floats(100, 30, ReduceOp::average);
  spec.prescale = 0.5;
  spec.postscale = 8;
  for (const PlanMaker maker : {ring_plan, halving_plan}) {
    Network network(4, spec, maker, 1);
    for (int rank = 0; rank < 4; ++rank)
      for (size_t i = 0; i < 100; ++i) network.data<float>(rank)[i] = static_cast<float>(rank + 1);
    network.run();
    for (int rank = 0; rank < 4; ++rank)
      for (size_t i = 0; i < 100; ++i) CHECK_EQUAL(network.data<float>(rank)[i], 10 * 0.5f * 8 / 4);
  }
}

TEST(integer_averages_round_down) {
  Spec spec = floats(50, 50, ReduceOp::average);
  spec.dtype = DType::i32;
  Network network(3, spec, ring_plan, 1);
  for (int rank = 0; rank < 3; ++rank)
    for (int i = 0; i < 50; ++i) network.data<int32_t>(rank)[i] = -i - rank;
  network.run();
  for (int rank = 0; rank < 3; ++rank)
    for (int i = 0; i < 50; ++i)
      CHECK_EQUAL(network.data<int32_t>(rank)[i],
                  static_cast<int32_t>(std::floor((-3.0 * i - 3) / 3)));
}

// 1 + 2^-8 + 2^-8 is 1 + 2^-7 in bf16; with a rounding at every hop it would stay 1.
TEST(sixteen_bit_floats_are_rounded_once) {
  Spec spec = floats(64, 20);
  spec.dtype = DType::bf16;
  for (const PlanMaker maker : {ring_plan, halving_plan}) {
    Network network(4, spec, maker, 2);
    const float values[] = {1.0f, 1.0f / 256, 1.0f / 256, 0.0f};
    for (int rank = 0; rank < 4; ++rank)
      std::fill_n(network.data<uint16_t>(rank), 64, bf16(values[rank]));
    network.run();
    for (int rank = 0; rank < 4; ++rank)
      for (int i = 0; i < 64; ++i)
        CHECK_EQUAL(network.data<uint16_t>(rank)[i], bf16(1.0f + 1.0f / 128));
    CHECK_EQUAL(network.bytes_sent, size_t{64 * 3 * (4 + 2)});  // sums as fp32, results as bf16
  }
}

TEST(broadcast_in_parts) {
  Spec spec = floats(333, 50);
  spec.kind = CollectiveKind::broadcast;
  Network network(4, spec, chain_plan, 3);
  for (int i = 0; i < 333; ++i) network.data<int32_t>(0)[i] = i;
  network.run();
  for (int rank = 0; rank < 4; ++rank)
    for (int i = 0; i < 333; ++i) CHECK_EQUAL(network.data<int32_t>(rank)[i], i);
}

TEST(frames_that_the_plan_does_not_expect_are_refused) {
  const std::array<std::byte, 4096> bytes{};
  const auto refused = [&](int from, uint32_t part, size_t length) {
    Network network(3, floats(90, 90), ring_plan, 1);
    const Error error =
        THROWN(Error, network.operations[0]->receive(from, part, bytes.data(), length));
    CHECK(error.code == ErrorCode::protocol);
  };
  refused(2, 1, 4);      // there is no part 1
  refused(2, 0, 124);    // a piece has 120 bytes
  refused(2, 0, 3);      // not a whole element
  refused(1, 0, 4);      // rank 1 sends nothing to rank 0
  Network network(3, floats(90, 90), ring_plan, 1);
  network.run();
  CHECK(THROWN(Error, network.operations[0]->receive(2, 0, bytes.data(), 4)).code ==
        ErrorCode::protocol);
}

TEST(early_frames_are_bounded_by_the_plan) {
  Network network(4, floats(400, 400), halving_plan, 1);
  Operation& operation = *network.operations[0];  // expects rank 2 first, then rank 1
  const std::array<std::byte, 1024> bytes{};
  operation.receive(1, 0, bytes.data(), 400);  // its quarter,
  operation.receive(1, 0, bytes.data(), 400);  // and what it sends back
  CHECK_EQUAL(operation.awaited(2), size_t{800});
  CHECK_EQUAL(operation.awaited(1), size_t{0});
  CHECK(THROWN(Error, operation.receive(1, 0, bytes.data(), 4)).code == ErrorCode::protocol);
}

TEST(a_failed_operation_settles_when_lanes_let_go) {
  Network network(3, floats(90, 90), ring_plan, 1);
  Operation& operation = *network.operations[0];
  operation.confirm();
  CHECK(operation.needs(1) && operation.needs(2) && !operation.needs(0));
  // Its allgather receives go straight to the buffer: play the left neighbour until one does.
  const std::array<std::byte, 120> bytes{};
  for (int step = 0; step < 2; ++step) operation.receive(2, 0, bytes.data(), 120);
  std::byte* place = operation.destination(2, 0, 120);
  CHECK(place != nullptr);
  operation.fail(Error(ErrorCode::peer_lost, "[test] lost", 2));
  CHECK(operation.error() && !operation.settled());
  operation.placed();
  CHECK(operation.settled());
  operation.receive(2, 0, place, 120);  // ignored
}

int main(int argc, char** argv) { return test::run(argc, argv); }
