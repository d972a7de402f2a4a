// How a PBox treats the pushes of several ranks: in the order of the ranks, each as a step of its
// own, and with bounded staleness; and the optimizer's state, read and set from outside.
#include <algorithm>

#include "pbox_box.h"

using namespace test;

namespace {

const Transport kShm{"shm", false};
constexpr size_t kCount = 3000;  // elements: several chunks, on both cores
constexpr int kCores = 2;

// One key, in memory of the workers or in place.
class Model {
 public:
  Model(Box& box, int workers, const Transport& transport, TableInfo info)
      : ranks(box.job(1, workers, transport)), info(info), table(box.table(1, ranks, this->info)) {
    for (size_t rank = 0; rank < static_cast<size_t>(workers); ++rank) {
      own_.emplace_back(kCount);
      if (!info.arena) continue;
      shared_.push_back(mapped(table->arenas[rank], Memory::Access::read_write));
    }
  }

  float* data(int rank) {
    const auto at = static_cast<size_t>(rank);
    return info.arena ? reinterpret_cast<float*>(shared_[at]->data()) : own_[at].data();
  }
  Worker& worker(int rank) { return *ranks[static_cast<size_t>(rank)]; }
  void push(int rank, float value, uint8_t flags = 0) {
    std::fill_n(data(rank), kCount, value);
    worker(rank).client.push(1, 0, flags, reinterpret_cast<std::byte*>(data(rank)));
  }
  float answer(int rank) {
    wait_all(worker(rank), 1);
    for (size_t i = 1; i < kCount; ++i) CHECK_EQUAL(data(rank)[i], data(rank)[0]);
    return data(rank)[0];
  }
  bool answered(int rank, double within_s) {
    return worker(rank).client.wait(1, PboxClient::kAllKeys, within_s);
  }
  // Rank 0's weights become everybody's, and all get these hyperparameters.
  void start(float weights, const HyperWire& hyper) {
    const int workers = static_cast<int>(ranks.size());
    for (int rank = 0; rank < workers; ++rank) {
      worker(rank).client.set_hyper(1, 0, hyper);
      push(rank, weights, rank == 0 ? flag::init : flag::init | flag::no_grad);
    }
    for (int rank = 0; rank < workers; ++rank) CHECK_EQUAL(answer(rank), weights);
  }

  std::vector<std::unique_ptr<Worker>> ranks;
  TableInfo info;
  std::shared_ptr<Table> table;

 private:
  std::vector<Floats> own_;
  std::vector<std::shared_ptr<Memory>> shared_;
};

TableInfo optimized(bool arena, uint32_t states, uint32_t staleness = 0) {
  TableInfo info = table_of({{kCount}}, kCores);
  info.arena = arena;
  info.server = true;
  info.states = states;
  info.staleness = staleness;
  return info;
}

struct Path {
  Transport transport;
  bool arena;
};
const Path kPaths[] = {{{"tcp"}, false}, {kShm, false}, {kShm, true}};

}  // namespace

// 1e8 + 1 - 1e8 is 0 in fp32, and 1e8 - 1e8 + 1 is 1: the order shows.
TEST(contributions_are_added_in_the_order_of_the_ranks) {
  const float values[] = {1e8f, 1.0f, -1e8f};
  const std::vector<std::vector<int>> orders = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {2, 0, 1}};
  for (const Path& path : kPaths) {
    Box box(kCores);
    TableInfo info = table_of({{kCount}}, kCores);
    info.arena = path.arena;
    info.deterministic = true;
    Model model(box, 3, path.transport, info);
    for (const auto& order : orders) {
      for (int rank : order) {
        model.push(rank, values[rank]);
        // Also over lanes of its own it comes before the next one.
        while (!path.arena && box.server.stalled(1).empty() && rank != order.back())
          std::this_thread::yield();
      }
      for (int rank = 0; rank < 3; ++rank) CHECK_EQUAL(model.answer(rank), 0.0f);
    }
  }
}

TEST(a_rank_without_a_gradient_keeps_nobody_waiting_for_its_turn) {
  Box box(kCores);
  TableInfo info = table_of({{kCount}}, kCores);
  info.deterministic = true;
  Model model(box, 3, {"tcp"}, info);
  for (int step = 0; step < 3; ++step) {
    model.push(2, 4);
    model.push(0, 0, step % 2 ? flag::no_grad : uint8_t{0});
    model.push(1, 0, flag::no_grad);
    for (int rank = 0; rank < 3; ++rank) CHECK_EQUAL(model.answer(rank), 4.0f);
  }
}

TEST(asynchronous_steps_are_answered_to_their_rank_alone) {
  for (const Path& path : kPaths) {
    Box box(kCores);
    Model model(box, 3, path.transport, optimized(path.arena, 1, TableInfo::kAsynchronous));
    model.start(10, sgd(1.0));
    for (int step = 0; step < 3; ++step) {
      model.push(1, 1);  // the others push nothing
      CHECK_EQUAL(model.answer(1), 9.0f - static_cast<float>(step));
    }
    model.push(2, 2);
    CHECK_EQUAL(model.answer(2), 5.0f);
    model.push(0, 0, flag::no_grad);  // no step, but the answer
    CHECK_EQUAL(model.answer(0), 5.0f);
    model.start(3, sgd(1.0));  // adopted by all, although they have made different numbers of steps
    model.push(0, 1);
    CHECK_EQUAL(model.answer(0), 2.0f);
  }
}

TEST(no_rank_gets_further_ahead_than_allowed) {
  constexpr uint32_t kStaleness = 2;
  for (const Path& path : kPaths) {
    Box box(kCores);
    Model model(box, 2, path.transport, optimized(path.arena, 1, kStaleness));
    model.start(10, sgd(1.0));
    for (uint32_t step = 0; step < kStaleness; ++step) {
      model.push(0, 1);
      CHECK_EQUAL(model.answer(0), 9.0f - static_cast<float>(step));
    }
    model.push(0, 1);  // its third step, while the other one has made none
    CHECK(!model.answered(0, 0.1));
    CHECK_EQUAL(box.server.stalled(1).at(0).missing.at(0), 1);
    model.push(1, 1);
    CHECK_EQUAL(model.answer(1), 6.0f);
    CHECK_EQUAL(model.answer(0), 6.0f);  // the weights of now
  }
}

TEST(a_rank_that_leaves_is_not_waited_for) {
  for (const Path& path : kPaths) {
    Box box(kCores);
    Model model(box, 2, path.transport, optimized(path.arena, 1, 1));
    model.start(10, sgd(1.0));
    model.push(0, 1);
    CHECK_EQUAL(model.answer(0), 9.0f);
    model.push(0, 1);
    CHECK(!model.answered(0, 0.1));
    model.worker(1).client.close();
    CHECK_EQUAL(model.answer(0), 8.0f);
  }
}

// Keys are pushed as backward makes them, the last one first.
TEST(first_keys_leave_first_where_the_lane_is_the_limit) {
  constexpr uint32_t kKeys = 40;
  Worker worker(0);
  End end;
  const auto sockets = tcp_sockets();
  const TcpOptions small{"", 64 << 10, 30, 64 << 10};
  worker.client.attach(0, make_tcp_lane(sockets[0], small, 64 << 10));
  end.attach(make_tcp_lane(sockets[1], small, 64 << 10));
  TableInfo info = table_of(std::vector<KeySpec>(kKeys, {64 << 10}), 1, 32 << 10);
  info.first_keys_first = true;
  worker.client.add(info, {});
  Floats memory(info.bytes / sizeof(float));
  std::vector<uint32_t> order;
  end.sink.keep = false;
  end.sink.on_frame = [&](Lane&, const Header& head, const std::byte*) {
    order.push_back(info.chunks[head.id - info.first_chunk].key);
  };
  for (uint32_t key = kKeys; key-- > 0;) worker.client.push(1, key, 0, at(memory, info, key));
  while (order.size() < info.chunks.size()) end.step();
  // A few were under way before the others came.
  const auto first = std::find(order.begin(), order.end(), 0u);
  CHECK(first - order.begin() < static_cast<long>(order.size()) / 4);
  CHECK(std::is_sorted(first, order.end()));
}

TEST(state_is_read_and_set) {
  for (const Path& path : kPaths) {
    Box box(kCores);
    Model model(box, 2, path.transport, optimized(path.arena, 1));
    model.start(10, sgd(1.0, 0.5));
    const auto step = [&](float value) {
      for (int rank = 0; rank < 2; ++rank) model.push(rank, value);
      CHECK_EQUAL(model.answer(0), model.answer(1));
      return model.data(0)[0];
    };
    const auto momentum = [&](int rank) {
      Floats found(kCount);
      model.worker(rank).client.read_state(1, 0, 1, reinterpret_cast<std::byte*>(found.data()));
      wait_all(model.worker(rank), 1);
      CHECK_EQUAL(found[kCount - 1], found[0]);
      return found[0];
    };
    CHECK_EQUAL(step(1), 8.0f);
    CHECK_EQUAL(momentum(1), 2.0f);
    CHECK_EQUAL(model.worker(1).client.taken(1, 0), 1u);
    const Floats set(kCount, 8);
    model.worker(0).client.write_state(1, 0, 1, 7, reinterpret_cast<const std::byte*>(set.data()));
    CHECK_EQUAL(step(1), 2.0f);  // momentum 8 * 0.5 + 2
    CHECK_EQUAL(momentum(0), 6.0f);
    CHECK_EQUAL(model.worker(0).client.taken(1, 0), 8u);
  }
}

TEST(weights_of_16_bits_are_read_and_set_in_full) {
  for (const Path& path : kPaths) {
    Box box(kCores);
    auto ranks = box.job(1, 1, path.transport);
    TableInfo info = table_of({{kCount, DType::bf16}}, kCores);
    info.arena = path.arena;
    info.server = true;
    const auto table = box.table(1, ranks, info);
    std::vector<uint16_t> own(kCount);
    const auto arena = path.arena ? mapped(table->arenas[0], Memory::Access::read_write) : nullptr;
    std::byte* memory = arena ? arena->data() : reinterpret_cast<std::byte*>(own.data());
    auto& client = ranks[0]->client;
    Floats wide(kCount), found(kCount);
    for (size_t i = 0; i < kCount; ++i) wide[i] = 1 + static_cast<float>(i) / 4096;
    client.push(1, 0, flag::init, memory);
    wait_all(*ranks[0], 1);
    client.write_state(1, 0, 0, 0, reinterpret_cast<const std::byte*>(wide.data()));
    client.read_state(1, 0, 0, reinterpret_cast<std::byte*>(found.data()));
    wait_all(*ranks[0], 1);
    CHECK(found == wide);
  }
}

int main(int argc, char** argv) { return test::run(argc, argv); }
