// The arithmetic of a chunk on its core: fold what arrives, or read it in place; when all workers
// have pushed, reduce or optimize, and answer ("tall" aggregation, paper section 3.2). One thread
// does it all while the chunk is in its cache.
#include <cstring>

#include "job.h"
#include "places.h"

namespace phub {
namespace {

void next_exchange(Arrivals& arrivals) {
  ++arrivals.step;
  for (uint32_t& step : arrivals.steps) ++step;
  arrivals.arrived.reset();
  arrivals.with_gradient.reset();
  arrivals.init = false;
}

}  // namespace

// --- over lanes: folded as it arrives ---

void JobShard::fold(TableShard& shard, uint32_t index, int rank, const std::byte* payload,
                    bool first) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const Arrivals& arrivals = shard.chunks[index].arrivals;
  const DType t = table.info.keys[chunk.key].dtype;
  const bool to_answer = !table.info.server && !is_16bit(t);
  std::byte* sum = to_answer ? narrow_at(table.answers[arrivals.step % 2], chunk)
                             : wide_at(table, table.sums, chunk);
  const Scale scale = arrivals.init ? Scale{} : table.info.scale;
  const size_t count = elements(table.info, chunk);
  if (!table.info.compression.packs() || arrivals.init)
    phub::fold(t, table.info.op, sum, payload, count, first, scale);
  else if (!fold_packed(table.info.compression, sum, payload, count, first, scale.pre))
    throw Error(ErrorCode::protocol,
                "[pbox] rank " + std::to_string(rank) + " sent chunk " +
                    std::to_string(table.info.first_chunk + index) +
                    " with elements that it does not have",
                rank);
}

// What comes before its turn is kept: at most one chunk of each rank.
void JobShard::fold_in_order(TableShard& shard, uint32_t index, int rank, const std::byte* payload,
                             size_t length) {
  ChunkState& state = shard.chunks[index];
  const RankSet& with_gradient = state.arrivals.with_gradient;
  if (payload && rank != state.in_order) state.held[rank].assign(payload, payload + length);
  bool first = (with_gradient << static_cast<size_t>(kMaxWorkers - state.in_order)).none();
  for (int& next = state.in_order;
       next < workers && state.arrivals.arrived.test(static_cast<size_t>(next)); ++next) {
    if (!with_gradient.test(static_cast<size_t>(next))) continue;
    fold(shard, index, next, next == rank ? payload : state.held.at(next).data(), first);
    first = false;
  }
  if (state.in_order < workers) return;
  state.in_order = 0;
  state.held.clear();
}

void JobShard::optimize(TableShard& shard, uint32_t index, const Update& update) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  ChunkState& state = shard.chunks[index];
  const StepArrays arrays =
      step_arrays(table, chunk, wide_at(table, table.master, chunk), nullptr, 0);
  step(table.info.keys[chunk.key].dtype, update, arrays, wide_at(table, table.sums, chunk),
       elements(table.info, chunk), table.info.scale, state.taken);
  state.taken += state_arrays(update) > 0;
}

const std::byte* JobShard::reduce_answer(TableShard& shard, uint32_t index) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const Arrivals& arrivals = shard.chunks[index].arrivals;
  const DType t = table.info.keys[chunk.key].dtype;
  std::byte* answer = narrow_at(table.answers[arrivals.step % 2], chunk);
  if (arrivals.with_gradient.none()) {
    std::memset(answer, 0, chunk.bytes);
    return answer;
  }
  const std::byte* sum = is_16bit(t) ? wide_at(table, table.sums, chunk) : answer;
  const Scale scale = arrivals.init ? Scale{} : table.info.scale;
  finish(t, arrivals.init ? ReduceOp::sum : table.info.op, answer, sum, elements(table.info, chunk),
         scale);
  return answer;
}

const std::byte* JobShard::optimized_answer(TableShard& shard, uint32_t index) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  ChunkState& state = shard.chunks[index];
  const KeyInfo& key = table.info.keys[chunk.key];
  std::byte* weights = wide_at(table, table.master, chunk);
  if (state.arrivals.with_gradient.none()) {
    // No rank has a gradient: weights and state stay as they are.
  } else if (state.arrivals.init) {
    const std::byte* sum = wide_at(table, table.sums, chunk);
    std::memcpy(weights, sum, chunk.bytes * (is_16bit(key.dtype) ? 2 : 1));
  } else {
    optimize(shard, index, agreed_update(key.group));
  }
  if (!is_16bit(key.dtype)) return weights;
  std::byte* answer = narrow_at(table.answers[state.arrivals.step % 2], chunk);
  copy_from_master(table, chunk, answer);
  return answer;
}

void JobShard::answer_chunk(TableShard& shard, uint32_t index) {
  const TableInfo& info = shard.table->info;
  Arrivals& arrivals = shard.chunks[index].arrivals;
  const std::byte* answer =
      info.server ? optimized_answer(shard, index) : reduce_answer(shard, index);
  Header header{FrameKind::result,       0, 0, info.first_chunk + index, arrivals.step,
                info.chunks[index].bytes};
  if (info.shared_answers) {
    header.flags = flag::in_answer;
    header.length = 0;
  }
  next_exchange(arrivals);
  ++answered_;
  for (Lane* lane : lanes_)
    if (lane) lane->send(header, header.length ? answer : nullptr, &shard.unsent);
  for (int rank = 0; rank < workers; ++rank) check_reading(rank);
}

void JobShard::send_weights(TableShard& shard, uint32_t index, uint32_t step, int rank) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const Header header{FrameKind::result, 0, 0, table.info.first_chunk + index, step, chunk.bytes};
  std::vector<std::byte> weights(chunk.bytes);
  copy_from_master(table, chunk, weights.data());
  lanes_[static_cast<size_t>(rank)]->send_copy(header, weights.data());
  check_reading(rank);
}

// --- in place: gradients are read where the workers wrote them ---

void JobShard::reduce_in_place(TableShard& shard, const KeyState& key, uint32_t index) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const DType t = table.info.keys[chunk.key].dtype;
  std::array<void*, kMaxWorkers> outs;
  std::array<const void*, kMaxWorkers> ins;
  int n = 0;
  for (int rank = 0; rank < workers; ++rank) {
    const auto at = static_cast<size_t>(rank);
    outs[at] = narrow_at(table.arenas[at], chunk);
    if (key.arrivals.with_gradient.test(at)) ins[static_cast<size_t>(n++)] = outs[at];
  }
  if (n == 0) {
    for (int rank = 0; rank < workers; ++rank)
      std::memset(outs[static_cast<size_t>(rank)], 0, chunk.bytes);
  } else if (key.arrivals.init) {
    for (int rank = 0; rank < workers; ++rank)
      if (outs[static_cast<size_t>(rank)] != ins[0])
        std::memcpy(outs[static_cast<size_t>(rank)], ins[0], chunk.bytes);
  } else {
    reduce(t, table.info.op, outs.data(), workers, ins.data(), n, elements(table.info, chunk),
           table.info.scale);
  }
}

void JobShard::optimize_in_place(TableShard& shard, const KeyState& key, uint32_t index) {
  const Table& table = *shard.table;
  const ChunkInfo& chunk = table.info.chunks[index];
  const KeyInfo& range = table.info.keys[chunk.key];
  ChunkState& state = shard.chunks[index];
  const size_t count = elements(table.info, chunk);
  std::array<void*, kMaxWorkers> outs;
  std::array<const void*, kMaxWorkers> ins;
  int n_out = 0, n = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(workers); ++rank) {
    std::byte* arena = narrow_at(table.arenas[rank], chunk);
    if (!table.info.shared) outs[static_cast<size_t>(n_out++)] = arena;
    if (key.arrivals.with_gradient.test(rank)) ins[static_cast<size_t>(n++)] = arena;
  }
  // In a shared model exchange t reads buffer t mod 2 and writes the other one; 16-bit weights
  // have a master in fp32 beside it.
  const uint32_t step = key.arrivals.step;
  std::byte* current = table.info.shared ? narrow_at(table.weights[step % 2], chunk) : nullptr;
  std::byte* next = table.info.shared ? narrow_at(table.weights[(step + 1) % 2], chunk) : nullptr;
  const bool own_master = table.master && (!table.info.shared || is_16bit(range.dtype));
  if (table.info.shared && (own_master || key.arrivals.init))
    outs[static_cast<size_t>(n_out++)] = next;

  if (key.arrivals.init && n > 0) {
    const void* weights = ins[0];
    if (own_master) set_master(table, chunk, weights);
    if (current) std::memcpy(current, weights, chunk.bytes);
    for (int i = 0; i < n_out; ++i)
      if (outs[static_cast<size_t>(i)] != weights)
        std::memcpy(outs[static_cast<size_t>(i)], weights, chunk.bytes);
  } else if (n == 0) {
    if (next)
      std::memcpy(next, current, chunk.bytes);
    else
      for (int i = 0; i < n_out; ++i) copy_from_master(table, chunk, outs[static_cast<size_t>(i)]);
  } else {
    const Update update = agreed_update(range.group);
    std::byte* master = own_master ? wide_at(table, table.master, chunk) : nullptr;
    StepArrays arrays =
        step_arrays(table, chunk, own_master ? master : current, outs.data(), n_out);
    if (!own_master) arrays.weights_out = next;
    reduce_step(range.dtype, update, arrays, ins.data(), n, count, table.info.scale, state.taken);
    state.taken += state_arrays(update) > 0;
  }
}

void JobShard::finish_key(const Place& place) {
  KeyState& key = place.shard->keys[place.index];
  const Header header{FrameKind::result,
                      flag::arena,
                      0,
                      place.shard->table->info.first_key + place.index,
                      key.arrivals.step,
                      0};
  next_exchange(key.arrivals);
  for (Lane* lane : lanes_)
    if (lane) lane->send(header, nullptr);
  for (int rank = 0; rank < workers; ++rank) check_reading(rank);
}

bool JobShard::work(int chunks) {
  if (ready_.empty()) return false;
  const Place place = ready_.front();
  KeyState& key = place.shard->keys[place.index];
  const bool server = place.shard->table->info.server;
  for (; chunks > 0 && key.next < key.chunks.size(); --chunks, ++key.next, ++answered_) {
    if (place.rank != Place::kAll)
      optimize_alone(*place.shard, key.chunks[key.next], place.rank);
    else if (server)
      optimize_in_place(*place.shard, key, key.chunks[key.next]);
    else
      reduce_in_place(*place.shard, key, key.chunks[key.next]);
  }
  if (key.next == key.chunks.size()) {
    ready_.pop_front();
    key.next = 0;
    if (place.rank == Place::kAll)
      finish_key(place);
    else
      finish_alone(place);
  }
  return true;
}

}  // namespace phub
