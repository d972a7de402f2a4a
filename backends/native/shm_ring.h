// The two rings of a shared-memory lane. Each is a byte ring with one producer and one consumer,
// mapped twice back to back, so that a frame is contiguous also where it wraps.
//
// A frame occupies a slot of whole cache lines: its header, padding to 64 bytes, its payload,
// padding to 64 bytes. Positions are counts of bytes since the beginning, they never wrap.
//
// Trust: the other end may write anything into the shared memory at any time. Each side keeps its
// own position privately, checks the other's before use, and copies a header before checking it.
//
// Sleeping (Dekker's pattern, every access sequentially consistent): the consumer stores the head
// it wants to be woken at and then looks at the head once more; the producer stores the head and
// then looks at what is wanted. One of them sees the other's store, so no wake-up is lost. The
// same with tail and space the other way round.
//
// Thread contract: a RingProducer and a RingConsumer are each used by one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "error.h"
#include "wire.h"

namespace phub {

inline constexpr size_t kSlotUnit = 64;

// Bytes that a frame with `length` bytes of payload occupies in a ring.
constexpr size_t slot_bytes(size_t length) {
  return kSlotUnit + (length + kSlotUnit - 1) / kSlotUnit * kSlotUnit;
}

struct RingControl {
  using Position = std::atomic<uint64_t>;
  static_assert(Position::is_always_lock_free);
  alignas(64) Position head;         // bytes published by the producer
  alignas(64) Position tail;         // bytes released by the consumer
  alignas(64) Position wanted_head;  // the consumer sleeps until head reaches this; 0: it does not
  alignas(64) Position wanted_tail;  // the producer sleeps until tail reaches this; 0: it does not
};

// One ring as it stands in memory.
struct Ring {
  RingControl* control = nullptr;
  std::byte* data = nullptr;  // 2 * capacity bytes of address space
  size_t capacity = 0;
};

class RingProducer {
 public:
  explicit RingProducer(Ring ring) : ring_(ring) {}

  // Copies a frame into the ring and publishes it; false: there is no room. `wake`: the consumer
  // sleeps and this is what it waits for, its bell must be rung.
  bool push(const Header& header, const void* payload, bool& wake);
  // Asks to be woken when half of the ring is free; true: there is room already.
  bool arm();
  void disarm() { ring_.control->wanted_tail = 0; }

 private:
  size_t free_bytes();

  Ring ring_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  // as last seen
};

class RingConsumer {
 public:
  explicit RingConsumer(Ring ring) : ring_(ring) {}

  // The next frame, or nullptr when there is none: its payload, valid until `release`.
  const std::byte* pop(Header& header, size_t max_payload);
  // Gives the room of all frames popped so far back. True: the producer's bell must be rung.
  bool release();
  size_t unreleased() const { return position_ - released_; }
  // Asks to be woken when `bytes` (at most half a ring) have arrived; true: they have.
  bool arm(size_t bytes);
  void disarm() { ring_.control->wanted_head = 0; }

 private:
  size_t available();

  Ring ring_;
  uint64_t position_ = 0;  // end of the last frame popped
  uint64_t released_ = 0;
  uint64_t head_ = 0;  // as last seen
};

// The memory file of a lane, mapped: two rings.
class RingMemory {
 public:
  // Takes over `fd`. Throws Error(protocol) unless it is a sealed file made by make_ring_memory.
  explicit RingMemory(int fd);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  // Number 0 or 1: which of the two rings.
  Ring ring(int number) const;
  size_t capacity() const { return capacity_; }

 private:
  void map(int fd);
  void unmap();

  size_t capacity_ = 0;
  std::byte* base_ = nullptr;  // address space: controls, ring 0 twice, ring 1 twice
};

}  // namespace phub
