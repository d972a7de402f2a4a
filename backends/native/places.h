// Where a chunk stands in a table's buffers, and what moves it between them.
#pragma once

#include "kernels/cpu.h"
#include "table.h"

namespace phub {

inline size_t elements(const TableInfo& info, const ChunkInfo& chunk) {
  return chunk.bytes / item_size(info.keys[chunk.key].dtype);
}

// A chunk's place in a buffer with the arena's layout.
inline std::byte* narrow_at(const std::shared_ptr<Memory>& memory, const ChunkInfo& chunk) {
  return memory->data() + chunk.offset;
}

// A chunk's place in a buffer in the accumulator type.
inline std::byte* wide_at(const Table& table, const std::shared_ptr<Memory>& memory,
                          const ChunkInfo& chunk) {
  return memory->data() + chunk.offset * table.wide;
}

// Weights given from outside: converted to the master's type.
inline void set_master(const Table& table, const ChunkInfo& chunk, const void* weights) {
  const DType t = table.info.keys[chunk.key].dtype;
  fold(t, ReduceOp::sum, wide_at(table, table.master, chunk), weights, elements(table.info, chunk),
       true);
}

inline void copy_from_master(const Table& table, const ChunkInfo& chunk, void* out) {
  const DType t = table.info.keys[chunk.key].dtype;
  finish(t, ReduceOp::sum, out, wide_at(table, table.master, chunk), elements(table.info, chunk));
}

// What a step with one copy of the weights, in the accumulator's type, reads and writes.
inline StepArrays step_arrays(const Table& table, const ChunkInfo& chunk, std::byte* weights,
                              void* const* outs, int n_out) {
  StepArrays arrays{weights, weights, {}, outs, n_out};
  for (size_t s = 0; s < table.state.size(); ++s)
    arrays.state[s] = wide_at(table, table.state[s], chunk);
  return arrays;
}

}  // namespace phub
