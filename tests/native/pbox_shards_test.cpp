// One worker's client over several servers, each with a part of a table's chunks.
#include <utility>

#include "pbox_box.h"

using namespace test;

namespace {

constexpr int kShards = 3, kCores = 2, kWorkers = 2;
constexpr size_t kChunk = 4096;
const std::vector<KeySpec> kKeys = {{5000}, {0}, {7}, {20000}};

// The table as a shard has it: its own numbers, no core for the chunks of others.
TableInfo on_shard(TableInfo info, int shard) {
  info.first_key += static_cast<uint32_t>(shard) * 17;
  info.first_chunk += static_cast<uint32_t>(shard) * 1000;
  for (ChunkInfo& chunk : info.chunks) {
    const bool is_own = chunk.core / kCores == shard;
    chunk.core = is_own ? static_cast<uint16_t>(chunk.core % kCores) : kNoCore;
  }
  return info;
}

struct Shards {
  std::vector<std::unique_ptr<Box>> boxes;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::unique_ptr<PboxClient>> clients;
  std::vector<std::shared_ptr<Table>> tables;

  Shards(const TableInfo& info, const Transport& transport) {
    std::vector<WireIds> ids;
    for (int shard = 0; shard < kShards; ++shard) {
      boxes.push_back(std::make_unique<Box>(kCores));
      boxes.back()->server.add_job(1, kWorkers);
      const TableInfo part = on_shard(info, shard);
      ids.push_back({part.first_key, part.first_chunk, 0});
      tables.push_back(boxes.back()->server.add_table(1, part, kWorkers));
    }
    for (int rank = 0; rank < kWorkers; ++rank) {
      engines.push_back(std::make_unique<Engine>());
      clients.push_back(std::make_unique<PboxClient>(*engines.back(), rank, kCores));
      for (int core = 0; core < kShards * kCores; ++core)
        clients.back()->attach(core, boxes[static_cast<size_t>(core / kCores)]->lane(
                                         1, rank, core % kCores, transport));
      clients.back()->add(info, {}, ids);
    }
  }
  ~Shards() { clients.clear(); }
};

float gradient(int rank, int step, size_t i) {
  return static_cast<float>(rank + step) + static_cast<float>(i % 251);
}

}  // namespace

TEST(sums_over_shards_that_number_a_table_differently) {
  const TableInfo info = table_of(kKeys, kShards * kCores, kChunk);
  for (const Transport& transport : {Transport{"tcp"}, Transport{"shm", false}}) {
    Shards shards(info, transport);
    together(kWorkers, [&](int rank) {
      PboxClient& client = *shards.clients[static_cast<size_t>(rank)];
      Floats memory(info.bytes / sizeof(float));
      for (int step = 0; step < 5; ++step) {
        for (size_t i = 0; i < memory.size(); ++i) memory[i] = gradient(rank, step, i);
        for (uint32_t key = 0; key < info.keys.size(); ++key)
          client.push(info.id, key, 0, at(memory, info, key));
        CHECK(client.wait(info.id, PboxClient::kAllKeys, kSoon));
        for (const KeyInfo& key : info.keys)
          for (size_t i = key.offset / 4; i < (key.offset + key.bytes) / 4; ++i)
            CHECK_EQUAL(memory[i], gradient(0, step, i) + gradient(1, step, i));
      }
    });
  }
}

TEST(a_shard_has_memory_for_its_own_chunks_only) {
  const TableInfo info = table_of(kKeys, kShards * kCores, kChunk);
  uint64_t sum = 0;
  for (int shard = 0; shard < kShards; ++shard) {
    const Table table(on_shard(info, shard), kWorkers);
    CHECK(table.info.bytes < info.bytes / kShards + kCores * kChunk);
    sum += table.info.bytes;
    for (const ChunkInfo& chunk : table.info.chunks)
      if (chunk.core != kNoCore) CHECK(chunk.offset + chunk.bytes <= table.info.bytes);
  }
  CHECK_EQUAL(sum, info.bytes);
  TableInfo in_place = on_shard(info, 0);
  in_place.arena = true;
  const Error error = THROWN(Error, Table(std::move(in_place), kWorkers));
  CHECK_CONTAINS(error.what(), "several servers");
}

TEST(a_lost_shard_is_named) {
  const TableInfo info = table_of(kKeys, kShards * kCores, kChunk);
  Shards shards(info, kTransports[0]);
  shards.boxes[1].reset();
  Floats memory(info.bytes / sizeof(float));
  const Error error = THROWN(Error, {
    for (uint32_t key = 0; key < info.keys.size(); ++key)
      shards.clients[0]->push(info.id, key, 0, at(memory, info, key));
    shards.clients[0]->wait(info.id, PboxClient::kAllKeys, kSoon);
  });
  CHECK(error.code == ErrorCode::peer_lost);
  CHECK_EQUAL(error.rank, -3);
  CHECK_CONTAINS(error.what(), "shard 1 of 3 was lost");
}

int main(int argc, char** argv) { return test::run(argc, argv); }
