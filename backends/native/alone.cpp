// Steps of single ranks: each push is optimized when it comes, with this rank's gradient alone, and
// answered when nobody is further behind than the table allows (asynchronous SGD, J. Dean et al.,
// 2012; stale synchronous parallel, Q. Ho et al., 2013). Answers are copies: others' steps go on
// changing the weights while they leave.
#include <algorithm>
#include <limits>

#include "job.h"
#include "places.h"

namespace phub {

// --- over lanes ---

void JobShard::step_alone(TableShard& shard, uint32_t index, int rank, const std::byte* payload) {
  const TableInfo& info = shard.table->info;
  Arrivals& arrivals = shard.chunks[index].arrivals;
  if (payload) {
    fold(shard, index, rank, payload, true);
    optimize(shard, index, update_of(info.keys[info.chunks[index].key].group, rank));
  }
  ++answered_;
  ++arrivals.steps[static_cast<size_t>(rank)];
  arrivals.waiting.set(static_cast<size_t>(rank));
  arrivals.with_gradient.reset(static_cast<size_t>(rank));
  answer_allowed_chunk(shard, index);
}

void JobShard::answer_allowed_chunk(TableShard& shard, uint32_t index) {
  Arrivals& arrivals = shard.chunks[index].arrivals;
  const RankSet ranks = allowed(shard.table->info, arrivals);
  arrivals.waiting &= ~ranks;
  arrivals.arrived &= ~ranks;
  for (int rank = 0; ranks.any() && rank < workers; ++rank)
    if (ranks.test(static_cast<size_t>(rank)) && lanes_[static_cast<size_t>(rank)])
      send_weights(shard, index, arrivals.finished(rank) - 1, rank);
}

// --- in place ---

void JobShard::optimize_alone(TableShard& shard, uint32_t index, int rank) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const auto at = static_cast<size_t>(rank);
  if (!shard.keys[chunk.key].arrivals.with_gradient.test(at)) return;
  ChunkState& state = shard.chunks[index];
  const KeyInfo& key = table.info.keys[chunk.key];
  const Update update = update_of(key.group, rank);
  const void* gradient = narrow_at(table.arenas[at], chunk);
  const StepArrays arrays =
      step_arrays(table, chunk, wide_at(table, table.master, chunk), nullptr, 0);
  reduce_step(key.dtype, update, arrays, &gradient, 1, elements(table.info, chunk),
              table.info.scale, state.taken);
  state.taken += state_arrays(update) > 0;
}

void JobShard::finish_alone(const Place& place) {
  Arrivals& arrivals = place.shard->keys[place.index].arrivals;
  const auto at = static_cast<size_t>(place.rank);
  ++arrivals.steps[at];
  arrivals.waiting.set(at);
  arrivals.with_gradient.reset(at);
  answer_allowed_key(*place.shard, place.index);
}

void JobShard::answer_allowed_key(TableShard& shard, uint32_t index) {
  const Table& table = *shard.table;
  KeyState& key = shard.keys[index];
  const RankSet ranks = allowed(table.info, key.arrivals);
  key.arrivals.waiting &= ~ranks;
  key.arrivals.arrived &= ~ranks;
  for (int rank = 0; ranks.any() && rank < workers; ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (!ranks.test(at) || !lanes_[at]) continue;
    for (const uint32_t chunk : key.chunks)
      copy_from_master(table, table.info.chunks[chunk],
                       narrow_at(table.arenas[at], table.info.chunks[chunk]));
    const Header header{FrameKind::result,
                        flag::arena,
                        0,
                        table.info.first_key + index,
                        key.arrivals.finished(rank) - 1,
                        0};
    lanes_[at]->send(header, nullptr);
    check_reading(rank);
  }
}

// --- either way ---

// The ranks that wait for an answer and are not too far ahead of the slowest one.
RankSet JobShard::allowed(const TableInfo& info, const Arrivals& arrivals) const {
  if (info.staleness == TableInfo::kAsynchronous) return arrivals.waiting;
  uint32_t slowest = std::numeric_limits<uint32_t>::max();
  for (size_t rank = 0; rank < arrivals.steps.size(); ++rank)
    if (!left_.test(rank)) slowest = std::min(slowest, arrivals.steps[rank]);
  RankSet found;
  for (size_t rank = 0; rank < arrivals.steps.size(); ++rank)
    if (arrivals.waiting.test(rank) && arrivals.steps[rank] <= slowest + uint64_t{info.staleness})
      found.set(rank);
  return found;
}

// A rank has left, so that others need not wait for it.
void JobShard::answer_allowed(TableShard& shard) {
  if (shard.table->info.staleness == 0) return;
  for (uint32_t key = 0; key < shard.keys.size(); ++key) answer_allowed_key(shard, key);
  for (uint32_t chunk = 0; chunk < shard.chunks.size(); ++chunk) answer_allowed_chunk(shard, chunk);
}

}  // namespace phub
