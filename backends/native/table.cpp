#include "table.h"

#include <algorithm>
#include <string>

namespace phub {
namespace {

// Chunks of other shards need no memory here: those of this one move together.
void pack(TableInfo& info) {
  uint64_t end = 0;
  for (ChunkInfo& chunk : info.chunks) {
    if (chunk.core == kNoCore) continue;
    chunk.offset = end;
    end += (chunk.bytes + 63) / 64 * 64;
  }
  info.bytes = end;
}

bool is_elsewhere(const ChunkInfo& chunk) { return chunk.core == kNoCore; }

void check_compression(const TableInfo& info) {
  const bool is_float = std::all_of(info.keys.begin(), info.keys.end(),
                                    [](auto& key) { return key.dtype == DType::f32; });
  const bool is_sum = info.op == ReduceOp::sum || info.op == ReduceOp::average;
  if (info.compression.is_valid() && is_float && is_sum && !info.arena && !info.shared_answers &&
      !info.shared)
    return;
  throw Error(ErrorCode::config,
              "[table] expected a known packing of float32 gradients that are summed and sent over "
              "lanes; got another type, reduction or place, or parameter " +
                  std::to_string(info.compression.parameter) + " of packing " +
                  std::to_string(static_cast<int>(info.compression.packing)));
}

}  // namespace

void TableInfo::check() const {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::config, "[table] " + what);
  };
  for (const KeyInfo& key : keys) {
    if (static_cast<int>(key.dtype) >= kDTypes) refuse("unknown dtype");
    if (key.offset + key.bytes > bytes || key.offset % 64) refuse("a key is outside of the arena");
    if (size_t{key.first_chunk} + key.chunks > chunks.size())
      refuse("a key's chunks are not there");
    if (server && key.dtype > DType::bf16) refuse("an optimizer needs floating-point keys");
  }
  if (shared_answers && (arena || server))
    refuse("answers are shared where gradients are only reduced");
  if ((arena || shared_answers) && std::any_of(chunks.begin(), chunks.end(), is_elsewhere))
    refuse("memory is not shared with several servers");
  if (states > kMaxStates || (states > 0 && !server)) refuse("states of an optimizer, 3 at most");
  if (staleness > 0 && (!server || shared || deterministic))
    refuse(
        "steps of single ranks are for an optimizer on the server, of a model that is not "
        "shared, in no fixed order");
  if (compression.packs()) check_compression(*this);
  for (const ChunkInfo& chunk : chunks) {
    if (chunk.key >= keys.size() || chunk.bytes > kMaxPayload) refuse("a chunk is out of bounds");
    const KeyInfo& key = keys[chunk.key];
    if (chunk.offset < key.offset || chunk.offset + chunk.bytes > key.offset + key.bytes)
      refuse("a chunk straddles keys");
    if (chunk.bytes % item_size(key.dtype)) refuse("a chunk splits an element");
  }
}

size_t push_bytes(const TableInfo& info, const ChunkInfo& chunk, uint8_t flags) {
  if (flags & flag::no_grad) return 0;
  if (flags & flag::init || !info.compression.packs()) return chunk.bytes;
  return packed_bytes(info.compression, chunk.bytes / sizeof(float));
}

Table::Table(TableInfo table, int workers) : info(std::move(table)) {
  info.check();
  if (std::any_of(info.chunks.begin(), info.chunks.end(), is_elsewhere)) pack(info);
  const auto& keys = info.keys;
  const bool narrow =
      std::any_of(keys.begin(), keys.end(), [](auto& k) { return is_16bit(k.dtype); });
  wide = narrow ? 2 : 1;
  if (info.arena)
    for (int rank = 0; rank < workers; ++rank)
      arenas.push_back(Memory::shared(info.bytes, Memory::Access::read_write));
  if (info.server) {
    for (uint32_t s = 0; s < info.states; ++s)
      state.push_back(Memory::anonymous(info.bytes * wide));
    if (!info.shared || narrow) master = Memory::anonymous(info.bytes * wide);
  }
  if (info.shared)
    for (auto& buffer : weights) buffer = Memory::shared(info.bytes, Memory::Access::copy_on_write);
  if (info.arena) return;
  if (info.server || narrow) sums = Memory::anonymous(info.bytes * wide);
  if (!info.server || narrow)
    for (auto& buffer : answers)
      buffer = info.shared_answers ? Memory::shared(info.bytes, Memory::Access::read_only)
                                   : Memory::anonymous(info.bytes);
}

}  // namespace phub
