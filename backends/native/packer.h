// A worker's packed gradients of one table: what it sends, and the residuals of what it has not
// sent.
//
// Thread contract: a key is packed by one thread at a time, and while none of its chunks is in
// flight; `form` may be called from any thread.
#pragma once

#include <memory>
#include <vector>

#include "table.h"

namespace phub {

class Packer {
 public:
  explicit Packer(const TableInfo& info);

  // Packs all chunks of a key, whose gradient begins at `gradient`.
  void pack(uint32_t key, const std::byte* gradient);
  // The packed form of a chunk; push_bytes() long.
  const std::byte* form(uint32_t chunk) const { return forms_->data() + places_[chunk]; }

 private:
  const Compression compression_;
  const std::vector<KeyInfo> keys_;
  const std::vector<ChunkInfo> chunks_;
  std::vector<size_t> places_;  // of each chunk in `forms_`
  std::shared_ptr<Memory> forms_;
  std::shared_ptr<Memory> residual_;  // with the arena's layout; nullptr: the packing has none
};

}  // namespace phub
