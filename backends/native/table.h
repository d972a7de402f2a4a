// A table: the keys of one registration (a model, or one ad-hoc tensor), how they are cut into
// chunks, and which core owns each chunk. Equal on the server and on every worker of the job.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/packed.h"
#include "memory.h"
#include "wire.h"

namespace phub {

struct KeyInfo {
  uint64_t offset, bytes;  // in the arena
  DType dtype;
  uint32_t group;         // the job's number of its parameter group
  uint32_t first_chunk;   // index in TableInfo::chunks; a key's chunks are neighbours
  uint32_t chunks;
};

inline constexpr uint16_t kNoCore = UINT16_MAX;  // of a chunk that another shard owns

struct ChunkInfo {
  uint64_t offset;
  uint32_t bytes;
  uint32_t key;  // index in TableInfo::keys
  uint16_t core;
};

struct TableInfo {
  uint32_t id = 0;
  uint32_t first_key = 0, first_chunk = 0;  // ids on the wire = these + index in this table
  uint64_t bytes = 0;                       // of the arena
  std::vector<KeyInfo> keys;
  std::vector<ChunkInfo> chunks;
  ReduceOp op = ReduceOp::sum;
  Scale scale;          // an average has 1/N in here
  // All workers share memory with the server, and so
  bool arena = false;           // gradients are read, and answered, in place; or
  bool shared_answers = false;  // workers copy answers from where the core made them
  bool server = false;  // the core runs the optimizer
  uint32_t states = 0;  // arrays of state that its rules keep at most
  bool shared = false;  // workers read the weights where the core writes them
  // Contributions are added in the order of the ranks, whenever they come: same bits in every run.
  bool deterministic = false;
  // 0: an exchange is one step with all ranks' gradients. Else each rank's push is a step of its
  // own, answered when nobody is more than so many steps behind (kAsynchronous: at once).
  uint32_t staleness = 0;
  static constexpr uint32_t kAsynchronous = UINT32_MAX;
  // Of what waits to be sent, or to be answered, lower keys go first.
  bool first_keys_first = false;
  Compression compression = {};  // of gradients that are pushed; answers are never packed

  // The range of a key's or chunk's bytes is inside the arena, and so on; throws Error(config).
  void check() const;
};

inline bool is_16bit(DType t) { return item_size(t) == 2; }

// Bytes that a push of a chunk with these flags carries; initial weights are never packed.
size_t push_bytes(const TableInfo& info, const ChunkInfo& chunk, uint8_t flags);

// The server's memory of a table. Buffers have the arena's layout, but a shard's hold its own chunks
// only, side by side; `info` then has their places there. Those in the accumulator type are `wide`:
// twice as large when the table holds 16-bit floats.
struct Table {
  explicit Table(TableInfo info, int workers);

  TableInfo info;
  size_t wide = 1;
  std::vector<std::shared_ptr<Memory>> arenas;  // arena: one per worker
  // Not arena: two answers, used in turn. Nobody pushes exchange t+2 of a chunk before all have
  // pushed t+1, hence received t: what is overwritten has left. Memory files if shared_answers.
  std::shared_ptr<Memory> answers[2];
  std::shared_ptr<Memory> sums;  // wide: where contributions are folded, if not in an answer
  std::shared_ptr<Memory> master;  // wide: weights
  std::vector<std::shared_ptr<Memory>> state;  // wide: the optimizer's arrays
  std::shared_ptr<Memory> weights[2];  // shared model: read by the workers, t mod 2
};

}  // namespace phub
