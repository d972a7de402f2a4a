// A PBox and its workers in one process, for tests: real cores, engines, lanes and sockets.
#pragma once

#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lane_pair.h"
#include "pbox_client.h"
#include "server.h"

namespace test {

constexpr double kSoon = 30;  // seconds, for what must happen

struct KeySpec {
  size_t count;
  DType dtype = DType::f32;
  uint32_t group = 0;
};

// Keys at multiples of 64 bytes, cut into chunks that go to the cores in turn. Tables of one job
// need different ids.
inline TableInfo table_of(const std::vector<KeySpec>& keys, int cores, size_t chunk_bytes = 4096,
                          uint32_t id = 1) {
  TableInfo info;
  info.id = id;
  info.first_key = id * 1000;
  info.first_chunk = id * 100000;
  for (uint32_t key = 0; key < keys.size(); ++key) {
    const uint64_t bytes = keys[key].count * item_size(keys[key].dtype);
    KeyInfo entry{info.bytes, bytes, keys[key].dtype, keys[key].group, 0, 0};
    entry.first_chunk = static_cast<uint32_t>(info.chunks.size());
    for (uint64_t at = 0; at < bytes; at += chunk_bytes, ++entry.chunks) {
      const auto length = static_cast<uint32_t>(std::min<uint64_t>(chunk_bytes, bytes - at));
      const auto core = static_cast<uint16_t>(info.chunks.size() % static_cast<size_t>(cores));
      info.chunks.push_back({info.bytes + at, length, key, core});
    }
    info.keys.push_back(entry);
    info.bytes += (bytes + 63) / 64 * 64;
  }
  return info;
}

inline HyperWire sgd(double lr, double momentum = 0, double dampening = 0,
                     double weight_decay = 0) {
  return {HyperWire::sgd, 0, lr, weight_decay, momentum, dampening, 0, 0, 0};
}

// Shared memory as a worker has it: another mapping.
inline std::shared_ptr<Memory> mapped(const std::shared_ptr<Memory>& memory,
                                      Memory::Access access) {
  return Memory::attach(dup(memory->fd()), memory->size(), access);
}

struct Worker {
  Engine engine;
  PboxClient client;
  explicit Worker(int rank) : client(engine, rank) {}
};

class Box {
 public:
  explicit Box(int cores) : server(cores) {}

  // Opens a lane to a core; returns the worker's end.
  std::unique_ptr<Lane> lane(uint32_t job, int rank, int core, const Transport& transport,
                             size_t max_payload = 64 << 10, size_t ring = 0) {
    if (std::string(transport.name) == "tcp") {
      const auto sockets = tcp_sockets();
      server.attach(job, rank, core, make_tcp_lane(sockets[0], {}, max_payload));
      return make_tcp_lane(sockets[1], {}, max_payload);
    }
    const auto sockets = unix_sockets();
    const int memory = make_ring_memory(ring ? ring : 2 * (max_payload + 64));
    const int ours = dup(memory);
    server.attach(job, rank, core, make_shm_lane(sockets[0], memory, -1, true, max_payload));
    return make_shm_lane(sockets[1], ours, -1, false, max_payload);
  }

  // A job and its workers, with a lane to every core.
  std::vector<std::unique_ptr<Worker>> job(uint32_t id, int size, const Transport& transport) {
    server.add_job(id, size);
    std::vector<std::unique_ptr<Worker>> workers;
    for (int rank = 0; rank < size; ++rank) {
      workers.push_back(std::make_unique<Worker>(rank));
      for (int core = 0; core < server.cores(); ++core)
        workers.back()->client.attach(core, lane(id, rank, core, transport));
    }
    return workers;
  }

  // Registers a table with the server and all workers.
  std::shared_ptr<Table> table(uint32_t job, std::vector<std::unique_ptr<Worker>>& workers,
                               const TableInfo& info) {
    auto made = server.add_table(job, info, static_cast<int>(workers.size()));
    for (auto& worker : workers) {
      std::vector<std::shared_ptr<Memory>> answers;
      for (size_t i = 0; info.shared_answers && i < 2; ++i)
        answers.push_back(mapped(made->answers[i], Memory::Access::read_only));
      worker->client.add(info, answers);
    }
    return made;
  }

  // Waits for an event of this job, dropping those of other jobs.
  JobEvent event(uint32_t job) {
    JobEvent event{};
    do CHECK(server.next_event(event, kSoon));
    while (event.job != job);
    return event;
  }

  Server server;
};

// Runs `act(rank)` on a thread for each rank and waits for all of them.
template <class F>
void together(int ranks, F act) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&act, rank] { act(rank); });
  for (auto& thread : threads) thread.join();
}

inline void wait_all(Worker& worker, uint32_t table) {
  CHECK(worker.client.wait(table, PboxClient::kAllKeys, kSoon));
}

// The error that ends a wait for the table's answers.
inline Error failure(Worker& worker, uint32_t table) {
  return THROWN(Error, CHECK(!worker.client.wait(table, PboxClient::kAllKeys, kSoon)));
}

// A worker's memory with the arena's layout, of floats.
using Floats = std::vector<float>;

inline std::byte* at(Floats& memory, const TableInfo& info, uint32_t key) {
  return reinterpret_cast<std::byte*>(memory.data()) + info.keys[key].offset;
}

inline void push_all(Worker& worker, const TableInfo& info, uint8_t flags, Floats& memory) {
  for (uint32_t key = 0; key < info.keys.size(); ++key)
    worker.client.push(info.id, key, flags, at(memory, info, key));
}

}  // namespace test
