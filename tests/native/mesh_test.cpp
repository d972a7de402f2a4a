// Meshes: several ranks in one process, each with its engine, on real lanes of both transports.
#include "mesh.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "lane_pair.h"
#include "plans.h"

using namespace test;

namespace {

constexpr size_t kFrame = 4 << 10;
constexpr double kLong = 30;  // seconds that nothing here takes

MeshOptions small_options() {
  MeshOptions options;
  options.frame_bytes = kFrame + 8192;  // an open frame with a long name must fit too
  options.window = 3;
  options.eager_bytes = 1 << 10;
  options.eager_window = 8 << 10;
  return options;
}

struct Rank {
  Engine engine;
  std::unique_ptr<Mesh> mesh;
};

// `size` ranks, connected by lanes of one transport.
class Ranks {
 public:
  Ranks(const std::string& transport, int size) : size_(size), ranks(static_cast<size_t>(size)) {
    const MeshOptions options = small_options();
    for (int r = 0; r < size; ++r)
      at(r).mesh = std::make_unique<Mesh>(at(r).engine, r, size, options);
    for (int a = 0; a < size; ++a)
      for (int b = a + 1; b < size; ++b) connect(transport, a, b, options.frame_bytes);
  }
  ~Ranks() {
    each([](int, Mesh& mesh) { mesh.close(1); });
  }

  Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
  Mesh& mesh(int rank) { return *at(rank).mesh; }

  // Runs `body` on a thread of its own for every rank that is there.
  template <class Body>
  void each(Body body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r)
      if (at(r).mesh) threads.emplace_back([&, r] { body(r, mesh(r)); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void connect(const std::string& transport, int a, int b, size_t max_payload) {
    if (transport == "tcp") {
      const auto sockets = tcp_sockets();
      mesh(a).attach(b, make_tcp_lane(sockets[0], {}, max_payload));
      mesh(b).attach(a, make_tcp_lane(sockets[1], {}, max_payload));
      return;
    }
    const auto sockets = unix_sockets();
    const int memory = make_ring_memory(2 * (max_payload + 64));
    mesh(a).attach(
        b, make_shm_lane(sockets[0], dup(memory), dup(at(b).engine.bell()), true, max_payload));
    mesh(b).attach(a,
                   make_shm_lane(sockets[1], memory, dup(at(a).engine.bell()), false, max_payload));
  }

  const int size_;

 public:
  std::vector<Rank> ranks;
};

Spec spec_of(size_t count, size_t part_count = 3000) {
  Spec spec;
  spec.count = count;
  spec.part_count = part_count;
  return spec;
}

std::shared_ptr<Operation> submit(Mesh& mesh, int rank, int size, const std::string& name,
                                  std::vector<float>& data, Spec spec,
                                  PlanMaker maker = ring_plan) {
  spec.count = data.size();
  const size_t parts = spec.count ? (spec.count + spec.part_count - 1) / spec.part_count : 1;
  return mesh.submit(name, spec, reinterpret_cast<std::byte*>(data.data()),
                     {parts > 1 ? maker(rank, size, spec.part_count) : nullptr,
                      maker(rank, size, spec.count - (parts - 1) * spec.part_count)});
}

std::vector<float> input(size_t count, int rank, int use = 0) {
  std::vector<float> data(count);
  for (size_t i = 0; i < count; ++i)
    data[i] = static_cast<float>(i % 100) + static_cast<float>(rank + use);
  return data;
}

bool is_sum(const std::vector<float>& data, int size, int use = 0) {
  for (size_t i = 0; i < data.size(); ++i) {
    const float expected = static_cast<float>(i % 100) * static_cast<float>(size) +
                           static_cast<float>(size * (size - 1) / 2 + size * use);
    if (data[i] != expected) return false;
  }
  return true;
}

Error error_of(Mesh& mesh, const Operation& operation) {
  return THROWN(Error, CHECK(mesh.wait(operation, kLong)));
}

constexpr const char* kLanes[] = {"shm", "tcp"};

}  // namespace

TEST(allreduce_of_many_sizes_and_uses) {
  for (const char* lane : kLanes)
    for (const int size : {1, 2, 3, 4}) {
      Ranks ranks(lane, size);
      ranks.each([&](int rank, Mesh& mesh) {
        for (int use = 0; use < 3; ++use)
          for (const size_t count : {0, 1, 2, 5, 1000, 3000, 3001, 50000}) {
            auto data = input(count, rank, use);
            const auto operation = submit(mesh, rank, size, "n" + std::to_string(count), data,
                                          spec_of(count), size == 3 ? ring_plan : halving_plan);
            CHECK(mesh.wait(*operation, kLong) && mesh.done(*operation));
            CHECK(is_sum(data, size, use));
          }
      });
    }
}

TEST(names_in_another_order_on_every_rank) {
  constexpr int kSize = 4, kNames = 40;
  for (const char* lane : kLanes) {
    Ranks ranks(lane, kSize);
    ranks.each([&](int rank, Mesh& mesh) {
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<size_t> order(kNames);
      std::iota(order.begin(), order.end(), size_t{0});
      for (int use = 0; use < 4; ++use) {
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> data(kNames);
        std::vector<std::shared_ptr<Operation>> operations(kNames);
        for (const size_t name : order) {
          data[name] = input(name * name * 20, rank, use);
          operations[name] =
              submit(mesh, rank, kSize, std::to_string(name), data[name], spec_of(0), halving_plan);
        }
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t name : order) {
          CHECK(mesh.wait(*operations[name], kLong));
          CHECK(is_sum(data[name], kSize, use));
        }
      }
    });
  }
}

TEST(the_background_finishes_what_nobody_waits_for) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 3);
    ranks.each([&](int rank, Mesh& mesh) {
      auto data = input(100000, rank);
      const auto operation = submit(mesh, rank, 3, "x", data, spec_of(0));
      const auto start = std::chrono::steady_clock::now();
      while (!mesh.done(*operation)) {
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
        std::this_thread::yield();
      }
      CHECK(is_sum(data, 3));
    });
  }
}

TEST(a_broadcast_from_a_chain_of_ranks) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 4);
    Spec spec = spec_of(0);
    spec.kind = CollectiveKind::broadcast;
    ranks.each([&](int rank, Mesh& mesh) {
      auto data = input(20000, rank);
      const auto operation = submit(mesh, rank, 4, "b", data, spec, chain_plan);
      CHECK(mesh.wait(*operation, kLong));
      CHECK(data == input(20000, 0));
    });
  }
}

TEST(who_has_not_submitted_is_missing) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 3);
    std::vector<std::vector<float>> data{input(5000, 0), input(5000, 1), input(5000, 2)};
    std::vector<std::shared_ptr<Operation>> operations(3);
    const auto start = [&](int rank) {
      auto& mine = data[static_cast<size_t>(rank)];
      operations[static_cast<size_t>(rank)] =
          submit(ranks.mesh(rank), rank, 3, "late", mine, spec_of(0));
    };
    start(0);
    start(1);
    ranks.each([&](int rank, Mesh& mesh) {
      if (rank == 2) return;
      const Operation& operation = *operations[static_cast<size_t>(rank)];
      CHECK(!mesh.wait(operation, 0.05));
      while (mesh.missing(operation) != std::vector<int>{2}) CHECK(!mesh.wait(operation, 0.05));
    });
    start(2);
    ranks.each([&](int rank, Mesh& mesh) {
      CHECK(mesh.wait(*operations[static_cast<size_t>(rank)], kLong));
      CHECK(is_sum(data[static_cast<size_t>(rank)], 3));
      CHECK(mesh.missing(*operations[static_cast<size_t>(rank)]).empty());
    });
  }
}

// A waits for Y before it submits X, B has filled the lane with X: both must pass.
TEST(a_large_operation_does_not_block_the_next) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 2);
    ranks.each([&](int rank, Mesh& mesh) {
      auto x = input(200000, rank), y = input(10, rank);
      std::shared_ptr<Operation> first;
      if (rank == 0) first = submit(mesh, rank, 2, "X", x, spec_of(0));
      CHECK(mesh.wait(*submit(mesh, rank, 2, "Y", y, spec_of(0)), kLong));
      if (rank == 1) first = submit(mesh, rank, 2, "X", x, spec_of(0));
      CHECK(mesh.wait(*first, kLong));
      CHECK(is_sum(x, 2) && is_sum(y, 2));
    });
  }
}

TEST(small_transfers_go_ahead_within_a_limit) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 2);
    constexpr int kNames = 100;  // of 100 bytes to the peer each: more than the limit in all
    std::vector<std::vector<float>> data[2];
    std::vector<std::shared_ptr<Operation>> operations[2];
    for (int rank = 0; rank < 2; ++rank) {
      for (int name = 0; name < kNames; ++name) data[rank].push_back(input(50, rank));
      for (int name = 0; name < kNames; ++name)
        operations[rank].push_back(submit(ranks.mesh(rank), rank, 2, std::to_string(name),
                                          data[rank][static_cast<size_t>(name)], spec_of(0)));
      // Rank 0 alone: its announcements are out, and data up to the limit.
      if (rank == 0) CHECK(!ranks.mesh(0).wait(*operations[0][0], 0.05));
    }
    ranks.each([&](int rank, Mesh& mesh) {
      for (int name = 0; name < kNames; ++name) {
        CHECK(mesh.wait(*operations[rank][static_cast<size_t>(name)], kLong));
        CHECK(is_sum(data[rank][static_cast<size_t>(name)], 2));
      }
    });
  }
}

TEST(a_name_in_flight_is_refused) {
  Ranks ranks("shm", 2);
  auto data = input(10, 0), again = input(10, 0), other = input(10, 1);
  const auto operation = submit(ranks.mesh(0), 0, 2, "x", data, spec_of(0));
  const Error error = THROWN(Error, submit(ranks.mesh(0), 0, 2, "x", again, spec_of(0)));
  CHECK(error.code == ErrorCode::duplicate);
  CHECK_CONTAINS(error.what(), "'x'");
  const auto theirs = submit(ranks.mesh(1), 1, 2, "x", other, spec_of(0));
  ranks.each([&](int rank, Mesh& mesh) { CHECK(mesh.wait(rank ? *theirs : *operation, kLong)); });
  CHECK(is_sum(data, 2) && is_sum(other, 2));
}

// At the first use and at a later one: rank 2 has another length, all fail that use, name both
// sides, and can go on with the next.
TEST(disagreement_fails_that_use_on_all_ranks) {
  for (const char* lane : kLanes)
    for (const int uses_before : {0, 2}) {
      Ranks ranks(lane, 3);
      ranks.each([&](int rank, Mesh& mesh) {
        for (int use = 0; use < uses_before; ++use) {
          auto data = input(100, rank);
          CHECK(mesh.wait(*submit(mesh, rank, 3, "x", data, spec_of(0)), kLong));
        }
        auto data = input(rank == 2 ? 64 : 100, rank);
        const Error error = error_of(mesh, *submit(mesh, rank, 3, "x", data, spec_of(0)));
        CHECK(error.code == ErrorCode::mismatch);
        CHECK_CONTAINS(error.what(), "rank 2 submitted allreduce sum float32 [64]");
        CHECK_CONTAINS(error.what(), "float32 [100]");
        auto next = input(7000, rank);
        CHECK(mesh.wait(*submit(mesh, rank, 3, "x", next, spec_of(0)), kLong));
        CHECK(is_sum(next, 3));
      });
    }
}

TEST(a_lost_rank_is_named_on_all_others) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 4);
    std::vector<std::vector<float>> data;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int rank = 0; rank < 4; ++rank) data.push_back(input(100000, rank));
    for (int rank = 0; rank < 4; ++rank)
      operations.push_back(rank == 1 ? nullptr
                                     : submit(ranks.mesh(rank), rank, 4, "x",
                                              data[static_cast<size_t>(rank)], spec_of(0)));
    ranks.at(1).mesh.reset();  // as a killed process: no bye
    ranks.each([&](int rank, Mesh& mesh) {
      const Error error = error_of(mesh, *operations[static_cast<size_t>(rank)]);
      CHECK(error.code == ErrorCode::peer_lost);
      CHECK_EQUAL(error.rank, 1);
      auto more = input(10, rank);
      CHECK_EQUAL(THROWN(Error, submit(mesh, rank, 4, "y", more, spec_of(0))).rank, 1);
    });
  }
}

TEST(who_leaves_in_good_order_is_no_loss) {
  for (const char* lane : kLanes) {
    Ranks ranks(lane, 3);
    ranks.each([&](int rank, Mesh& mesh) {
      auto data = input(60000, rank);
      CHECK(mesh.wait(*submit(mesh, rank, 3, "x", data, spec_of(0)), kLong));
      CHECK(is_sum(data, 3));
      if (rank == 1) mesh.close(kLong);
    });
    auto data = input(10, 0);
    const Error error = THROWN(Error, {
      const auto operation = submit(ranks.mesh(0), 0, 3, "y", data, spec_of(0));
      ranks.mesh(0).wait(*operation, kLong);
    });
    CHECK(error.code == ErrorCode::peer_lost);
    CHECK_EQUAL(error.rank, 1);
    CHECK_CONTAINS(error.what(), "has ended");
    CHECK(THROWN(Error, submit(ranks.mesh(1), 1, 3, "y", data, spec_of(0))).code ==
          ErrorCode::config);
  }
}

// Rank 1 is a bare lane that sends what it likes.
TEST(nonsense_from_a_peer_ends_with_a_protocol_error) {
  struct Offence {
    const char* text;
    std::function<void(Lane&)> send;
  };
  const auto open = [](Lane& lane, uint32_t number, const char* name, size_t count) {
    const auto payload = encode_open(spec_of(count), name);
    lane.send_copy(header(FrameKind::open, number, payload.size()), payload.data());
  };
  const std::vector<std::byte> bytes(kFrame);
  const auto data = [&](Lane& lane, uint32_t use, uint16_t part, size_t length) {
    Header head = header(FrameKind::data, 0, length, use);
    head.sender = part;
    lane.send_copy(head, bytes.data());
  };
  const Offence offences[] = {
      {"of kind 1", [](Lane& lane) { lane.send(header(FrameKind::push, 0, 0), nullptr); }},
      {"never announced", [&](Lane& lane) { data(lane, 0, 0, 8); }},
      {"never announced", [](Lane& lane) { lane.send(header(FrameKind::posted, 5, 0), nullptr); }},
      {"expected 0", [&](Lane& lane) { open(lane, 7, "x", 100); }},
      {"of 3 bytes",
       [&](Lane& lane) { lane.send_copy(header(FrameKind::open, 0, 3), bytes.data()); }},
      {"announced again", [&](Lane& lane) { open(lane, 0, "x", 100), open(lane, 0, "y", 100); }},
      {"part 9", [&](Lane& lane) { open(lane, 0, "x", 100), data(lane, 0, 9, 8); }},
      {"expected at most", [&](Lane& lane) { open(lane, 0, "x", 100), data(lane, 0, 0, 400); }},
      {"without credit",
       [&](Lane& lane) {
         open(lane, 0, "x", 100);
         for (int i = 0; i < 3; ++i) data(lane, 1, 0, kFrame);
       }},
  };
  for (const char* lane : kLanes)
    for (const Offence& offence : offences) {
      const MeshOptions options = small_options();
      Pair pair({lane, false}, options.frame_bytes);
      Engine engine;
      Mesh mesh(engine, 0, 2, options);
      pair.left.poller.remove(*pair.left.lane);
      mesh.attach(1, std::move(pair.left.lane));
      auto numbers = input(100, 0);
      const auto operation = submit(mesh, 0, 2, "x", numbers, spec_of(0));
      offence.send(*pair.right.lane);
      const Error error = error_of(mesh, *operation);
      CHECK(error.code == ErrorCode::protocol);
      CHECK_CONTAINS(error.what(), offence.text);
      pair.right.drive([&] { return pair.right.lane->is_closed(); });
    }
}

int main(int argc, char** argv) { return test::run(argc, argv); }
