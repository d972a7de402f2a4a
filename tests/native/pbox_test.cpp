// A PBox and its workers over real lanes: sums, the optimizer, shared models, and orderly ends.
#include <chrono>
#include <cmath>
#include <random>

#include "pbox_box.h"

using namespace test;

namespace {

const std::vector<KeySpec> kKeys = {{5000}, {0}, {1}, {77}, {1024}, {20001}};
constexpr int kCores = 2;

// How the workers' memory is reached.
struct Path {
  const char* name;
  Transport transport;
  bool arena = false, shared_answers = false;
};
const Path kPaths[] = {{"tcp", {"tcp"}},
                       {"shm", {"shm", false}},
                       {"shm with shared answers", {"shm", false}, false, true},
                       {"in place", {"shm", false}, true}};

// Memory for each worker: its arena, or its own; and where the weights of a shared model stand.
struct Memories {
  std::vector<Floats> own;
  std::vector<std::shared_ptr<Memory>> shared;
  std::vector<float*> data;
  std::vector<const float*> weights;  // [exchange mod 2]

  Memories(const TableInfo& info, const Table& table, int workers) {
    for (size_t rank = 0; rank < static_cast<size_t>(workers); ++rank) {
      own.emplace_back(info.arena ? 0 : info.bytes / sizeof(float));
      data.push_back(info.arena ? map(table.arenas[rank], Memory::Access::read_write)
                                : own.back().data());
    }
    for (size_t i = 0; info.shared && i < 2; ++i)
      weights.push_back(map(table.weights[i], Memory::Access::copy_on_write));
  }
  float* map(const std::shared_ptr<Memory>& memory, Memory::Access access) {
    shared.push_back(mapped(memory, access));
    return reinterpret_cast<float*>(shared.back()->data());
  }
  std::byte* at(const TableInfo& info, int rank, uint32_t key) {
    return reinterpret_cast<std::byte*>(data[static_cast<size_t>(rank)]) + info.keys[key].offset;
  }
};

float gradient(int rank, int step, size_t element) {
  return static_cast<float>(
             (static_cast<size_t>(rank) * 7 + static_cast<size_t>(step) * 3 + element) % 41) -
         20;
}

// SGD as torch.optim.SGD has it, for one element.
float sgd_step(const HyperWire& h, float weight, float gradient, float& momentum, bool first) {
  const float g = gradient + static_cast<float>(h.weight_decay) * weight;
  momentum =
      first ? g
            : static_cast<float>(h.momentum) * momentum + static_cast<float>(1 - h.dampening) * g;
  return weight - static_cast<float>(h.lr) * momentum;
}

// Pushes one gradient of all keys and waits for the answer.
void exchange(Worker& worker, const TableInfo& info, Memories& memories, int rank, int step,
              uint8_t flags = 0) {
  for (size_t i = 0; i < info.bytes / sizeof(float); ++i)
    memories.data[static_cast<size_t>(rank)][i] = gradient(rank, step, i);
  for (uint32_t key = 0; key < info.keys.size(); ++key)
    worker.client.push(info.id, key, flags, memories.at(info, rank, key));
  wait_all(worker, info.id);
}

bool is_padding(const TableInfo& info, size_t element) {
  for (const KeyInfo& key : info.keys) {
    const size_t begin = key.offset / sizeof(float);
    if (element >= begin && element < begin + key.bytes / sizeof(float)) return false;
  }
  return true;
}

void check_sums(const Path& path, int workers, int steps) {
  Box box(kCores);
  auto ranks = box.job(1, workers, path.transport);
  TableInfo info = table_of(kKeys, kCores);
  info.arena = path.arena;
  info.shared_answers = path.shared_answers;
  const auto table = box.table(1, ranks, info);
  Memories memories(info, *table, workers);
  together(workers, [&](int rank) {
    for (int step = 0; step < steps; ++step) {
      exchange(*ranks[static_cast<size_t>(rank)], info, memories, rank, step);
      for (size_t i = 0; i < info.bytes / sizeof(float); ++i) {
        float sum = 0;
        for (int other = 0; other < workers; ++other) sum += gradient(other, step, i);
        if (!is_padding(info, i)) CHECK_EQUAL(memories.data[static_cast<size_t>(rank)][i], sum);
      }
    }
    ranks[static_cast<size_t>(rank)]->client.close();
  });
  CHECK_EQUAL(box.server.chunks_answered(1), info.chunks.size() * static_cast<size_t>(steps));
  box.server.drop_job(1);
}

// Twenty steps of the server's optimizer against the rule applied to one copy of the model.
void check_optimizer(const Path& path, bool shared) {
  constexpr int kWorkers = 3, kSteps = 20;
  Box box(kCores);
  auto ranks = box.job(1, kWorkers, path.transport);
  TableInfo info = table_of(kKeys, kCores);
  info.arena = path.arena;
  info.server = true;
  info.states = 1;
  info.shared = shared;
  info.scale.post = 1.0 / kWorkers;
  const auto table = box.table(1, ranks, info);
  Memories memories(info, *table, kWorkers);
  const size_t elements = info.bytes / sizeof(float);
  Floats expected(elements), momentum(elements);
  for (size_t i = 0; i < elements; ++i) expected[i] = gradient(0, 100, i);

  together(kWorkers, [&](int rank) {  // rank 0's weights become everybody's
    exchange(*ranks[static_cast<size_t>(rank)], info, memories, rank, 100,
             rank == 0 ? flag::init : flag::init | flag::no_grad);
  });
  for (int step = 0; step < kSteps; ++step) {
    const HyperWire hyper = sgd(0.01 * (step + 1), 0.9, 0.1, 0.01);
    for (size_t i = 0; i < elements; ++i) {
      float sum = 0;
      for (int rank = 0; rank < kWorkers; ++rank) sum += gradient(rank, step, i);
      expected[i] = sgd_step(hyper, expected[i], sum * static_cast<float>(1.0 / kWorkers),
                             momentum[i], step == 0);
    }
    together(kWorkers, [&](int rank) {
      ranks[static_cast<size_t>(rank)]->client.set_hyper(1, 0, hyper);
      exchange(*ranks[static_cast<size_t>(rank)], info, memories, rank, step);
    });
    for (int rank = 0; rank < kWorkers; ++rank) {
      const float* weights = shared ? memories.weights[static_cast<size_t>(step % 2)]
                                    : memories.data[static_cast<size_t>(rank)];
      for (size_t i = 0; i < elements; ++i)
        if (!is_padding(info, i))
          CHECK(std::abs(weights[i] - expected[i]) <= 1e-5f * (1 + std::abs(expected[i])));
    }
  }
}

}  // namespace

TEST(sums_are_exact_over_every_path) {
  for (const Path& path : kPaths) check_sums(path, 3, 12);
}

TEST(eight_workers_and_one_worker) {
  for (const Path& path : kPaths) {
    check_sums(path, 8, 3);
    check_sums(path, 1, 3);
  }
}

TEST(the_optimizer_follows_the_rule_over_every_path) {
  for (const Path& path : kPaths)
    if (!path.shared_answers) check_optimizer(path, false);
}

TEST(the_optimizer_follows_the_rule_in_a_shared_model) { check_optimizer(kPaths[3], true); }

TEST(many_jobs_on_the_same_cores) {
  constexpr int kJobs = 4;
  Box box(kCores);
  together(kJobs, [&](int job) {
    const Path& path = kPaths[job];
    const auto id = static_cast<uint32_t>(job) + 1;
    auto ranks = box.job(id, 2, path.transport);
    TableInfo info = table_of(kKeys, kCores);  // the same ids in every job
    info.arena = path.arena;
    info.shared_answers = path.shared_answers;
    const auto table = box.table(id, ranks, info);
    Memories memories(info, *table, 2);
    together(2, [&](int rank) {
      for (int step = 0; step < 10; ++step) {
        exchange(*ranks[static_cast<size_t>(rank)], info, memories, rank, step + job);
        for (size_t i = 0; i < 1000; ++i)
          CHECK_EQUAL(memories.data[static_cast<size_t>(rank)][i],
                      gradient(0, step + job, i) + gradient(1, step + job, i));
      }
    });
    box.server.drop_job(id);
  });
}

TEST(keys_without_a_gradient_count_as_zeros_or_leave_the_weights_alone) {
  for (const Path& path : {kPaths[0], kPaths[3]}) {
    Box box(1);
    auto ranks = box.job(1, 2, path.transport);
    TableInfo info = table_of({{2000}}, 1);
    info.arena = path.arena;
    info.server = true;
    info.states = 1;
    const auto table = box.table(1, ranks, info);
    Memories memories(info, *table, 2);
    const auto step = [&](float value, uint8_t flags0, uint8_t flags1) {
      together(2, [&](int rank) {
        auto& client = ranks[static_cast<size_t>(rank)]->client;
        client.set_hyper(1, 0, sgd(1.0, 0.5, 0, 0.1));
        std::fill_n(memories.data[static_cast<size_t>(rank)], 2000, value);
        client.push(1, 0, rank == 0 ? flags0 : flags1, memories.at(info, rank, 0));
        wait_all(*ranks[static_cast<size_t>(rank)], 1);
      });
      CHECK_EQUAL(memories.data[0][1999], memories.data[1][1999]);
      return memories.data[0][1999];
    };
    CHECK_EQUAL(step(8, flag::init, flag::init | flag::no_grad), 8.0f);
    CHECK(std::abs(step(2, 0, flag::no_grad) - (8 - (2 + 0.8f))) < 1e-5);  // momentum 2.8
    CHECK(std::abs(step(9, flag::no_grad, flag::no_grad) - 5.2f) < 1e-5);
    CHECK(std::abs(step(0, 0, 0) - (5.2f - (0.52f + 1.4f))) < 1e-5);
  }
}

TEST(hyperparameters_that_differ_are_a_mismatch_on_every_rank) {
  for (const Path& path : {kPaths[1], kPaths[3]}) {
    Box box(kCores);
    auto ranks = box.job(1, 2, path.transport);
    TableInfo info = table_of({{5000}}, kCores);
    info.arena = path.arena;
    info.server = true;
    const auto table = box.table(1, ranks, info);
    Memories memories(info, *table, 2);
    together(2, [&](int rank) {
      auto& worker = *ranks[static_cast<size_t>(rank)];
      worker.client.set_hyper(1, 0, sgd(rank == 0 ? 0.5 : 0.25));
      worker.client.push(1, 0, 0, memories.at(info, rank, 0));
      const Error error = failure(worker, 1);
      CHECK(error.code == ErrorCode::mismatch);
      CHECK_CONTAINS(error.what(), "rank 0 has sgd lr 0.5");
      CHECK_CONTAINS(error.what(), "rank 1 has sgd lr 0.25");
    });
  }
}

TEST(initial_weights_that_no_rank_or_two_ranks_send_are_refused) {
  for (const uint8_t first : {uint8_t{flag::init | flag::no_grad}, uint8_t{flag::init}}) {
    Box box(1);
    auto ranks = box.job(1, 2, {"tcp"});
    const TableInfo info = table_of({{10}}, 1);
    box.table(1, ranks, info);
    Floats memory(16);
    ranks[0]->client.push(1, 0, first, at(memory, info, 0));
    ranks[1]->client.push(1, 0, first, at(memory, info, 0));
    const Error error = failure(*ranks[0], 1);
    CHECK(error.code == (first == flag::init ? ErrorCode::protocol : ErrorCode::mismatch));
  }
}

TEST(pull_brings_the_current_weights) {
  Box box(kCores);
  auto ranks = box.job(1, 2, {"shm", false});
  TableInfo info = table_of({{3000}, {10}}, kCores);
  info.server = true;
  box.table(1, ranks, info);
  Floats memory(info.bytes / sizeof(float), 3), other(memory), pulled(memory.size());
  push_all(*ranks[0], info, flag::init, memory);
  push_all(*ranks[1], info, flag::init | flag::no_grad, other);
  wait_all(*ranks[0], 1);
  wait_all(*ranks[1], 1);
  ranks[1]->client.pull(1, 0, at(pulled, info, 0));
  wait_all(*ranks[1], 1);
  CHECK_EQUAL(pulled[2999], 3.0f);
}

TEST(a_key_in_flight_cannot_be_started_again) {
  Box box(1);
  auto ranks = box.job(1, 2, {"tcp"});
  const TableInfo info = table_of({{10}}, 1);
  box.table(1, ranks, info);
  Floats memory(16);
  ranks[0]->client.push(1, 0, 0, at(memory, info, 0));
  const Error error = THROWN(Error, ranks[0]->client.push(1, 0, 0, at(memory, info, 0)));
  CHECK(error.code == ErrorCode::duplicate);
  CHECK(!ranks[0]->client.wait(1, 0, 0.01));
}

// Else the chunks of a lane that is ahead would only wait for those of another worker's.
TEST(no_lane_runs_far_ahead_of_one_that_cannot_send) {
  constexpr size_t kBytes = 16 << 20, kFar = 1 << 20;
  Worker worker(0);
  End ends[2];
  for (int core = 0; core < 2; ++core) {
    const auto sockets = tcp_sockets();
    const TcpOptions small{"", 64 << 10, 30, 64 << 10};
    worker.client.attach(core, make_tcp_lane(sockets[0], small, 64 << 10));
    ends[core].attach(make_tcp_lane(sockets[1], small, 64 << 10));
    ends[core].sink.keep = false;
  }
  const TableInfo info = table_of({{kBytes / sizeof(float)}}, 2, 32 << 10);
  worker.client.add(info, {});
  Floats memory(kBytes / sizeof(float));
  worker.client.push(1, 0, 0, at(memory, info, 0));
  ends[1].drive([&] { return ends[1].sink.bytes > 0; });
  for (int quiet = 0; quiet < 50; ++quiet) {
    if (ends[1].step()) quiet = 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(ends[1].sink.bytes < kFar);  // the other one has not been read at all
  const auto all = [&] { return ends[0].sink.bytes + ends[1].sink.bytes == kBytes; };
  while (!all()) {
    ends[0].step();
    ends[1].step();
  }
}

TEST(tables_come_and_go) {
  Box box(kCores);
  auto ranks = box.job(1, 2, {"shm", false});
  for (uint32_t id = 1; id <= 50; ++id) {
    const TableInfo info = table_of({{id * 10}}, kCores, 4096, id);
    box.table(1, ranks, info);
    together(2, [&](int rank) {
      Floats memory(info.bytes / sizeof(float), static_cast<float>(rank + 1));
      push_all(*ranks[static_cast<size_t>(rank)], info, 0, memory);
      wait_all(*ranks[static_cast<size_t>(rank)], id);
      CHECK_EQUAL(memory[0], 3.0f);
    });
    for (auto& rank : ranks) rank->client.drop(id);
    box.server.drop_table(1, id);
  }
}

int main(int argc, char** argv) { return test::run(argc, argv); }
