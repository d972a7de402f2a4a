#include "packer.h"

namespace phub {

Packer::Packer(const TableInfo& info)
    : compression_(info.compression), keys_(info.keys), chunks_(info.chunks) {
  size_t end = 0;
  for (const ChunkInfo& chunk : chunks_) {
    places_.push_back(end);
    end += push_bytes(info, chunk, 0);
  }
  forms_ = Memory::anonymous(end);
  if (compression_.has_residual()) residual_ = Memory::anonymous(info.bytes);
}

void Packer::pack(uint32_t key, const std::byte* gradient) {
  const KeyInfo& range = keys_[key];
  for (uint32_t index = range.first_chunk; index < range.first_chunk + range.chunks; ++index) {
    const ChunkInfo& chunk = chunks_[index];
    phub::pack(compression_, forms_->data() + places_[index],
               residual_ ? residual_->data() + chunk.offset : nullptr,
               gradient + (chunk.offset - range.offset), chunk.bytes / sizeof(float));
  }
}

}  // namespace phub
