// A table: the keys of one registration (a model, or one ad-hoc tensor), how they are cut into
// chunks, and which core owns each chunk. Equal on the server and on every worker of the job.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu.h"
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
  bool shared = false;  // workers read the weights where the core writes them

  // The range of a key's or chunk's bytes is inside the arena, and so on; throws Error(config).
  void check() const;
};

inline bool is_16bit(DType t) { return item_size(t) == 2; }

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
  std::shared_ptr<Memory> sums;      // wide: where contributions are folded, if not in an answer
  std::shared_ptr<Memory> master;    // wide: weights
  std::shared_ptr<Memory> momentum;  // wide
  std::shared_ptr<Memory> weights[2];  // shared model: read by the workers, t mod 2
};

}  // namespace phub
