#include "shm_ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "lane.h"

namespace phub {
namespace {

constexpr size_t kPage = 4096;  // the file: one page of controls, then the bytes of each ring
constexpr size_t kMaxRing = size_t{1} << 30;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
static_assert(2 * sizeof(RingControl) <= kPage);

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::protocol, "[shm] " + what + "; the lane is closed");
}

[[noreturn]] void close_and_throw(int fd, const char* what) {
  const int number = errno;
  close(fd);
  throw system_error(what, number);
}

// Frames that a sleeping consumer lets pile up until its mark; all others wake it at once.
bool is_bulk(FrameKind kind) {
  return kind == FrameKind::push || kind == FrameKind::result || kind == FrameKind::data ||
         kind == FrameKind::posted;
}

}  // namespace

// --- producer ---

size_t RingProducer::free_bytes() {
  const uint64_t tail = ring_.control->tail;
  if (tail - tail_ > head_ - tail_) refuse("expected a position inside the ring, got another");
  tail_ = tail;
  return ring_.capacity - static_cast<size_t>(head_ - tail);
}

bool RingProducer::push(const Header& header, const void* payload, bool& wake) {
  const size_t slot = slot_bytes(header.length);
  if (ring_.capacity - static_cast<size_t>(head_ - tail_) < slot && free_bytes() < slot)
    return false;
  std::byte* place = ring_.data + head_ % ring_.capacity;
  std::memcpy(place, &header, sizeof header);
  if (header.length > 0) std::memcpy(place + kSlotUnit, payload, header.length);
  head_ += slot;
  ring_.control->head = head_;
  const uint64_t wanted = ring_.control->wanted_head;
  wake = wanted != 0 && (head_ >= wanted || !is_bulk(header.kind));
  if (wake) ring_.control->wanted_head = 0;
  return true;
}

bool RingProducer::arm() {
  const size_t half = ring_.capacity / 2;
  if (free_bytes() >= half) return true;
  ring_.control->wanted_tail = head_ - half;
  if (free_bytes() < half) return false;
  disarm();
  return true;
}

// --- consumer ---

size_t RingConsumer::available() {
  const uint64_t head = ring_.control->head;
  if (head - head_ > released_ + ring_.capacity - head_ || head % kSlotUnit != 0)
    refuse("expected a position inside the ring, got another");
  head_ = head;
  return static_cast<size_t>(head - position_);
}

const std::byte* RingConsumer::pop(Header& header, size_t max_payload) {
  size_t there = static_cast<size_t>(head_ - position_);
  if (there == 0) there = available();
  if (there == 0) return nullptr;
  const std::byte* place = ring_.data + position_ % ring_.capacity;
  std::memcpy(&header, place, sizeof header);
  check_header(header, max_payload);
  const size_t slot = slot_bytes(header.length);
  if (slot > there) refuse("expected a whole frame, got a part of one");
  position_ += slot;
  return place + kSlotUnit;
}

bool RingConsumer::release() {
  released_ = position_;
  ring_.control->tail = released_;
  const uint64_t wanted = ring_.control->wanted_tail;
  if (wanted == 0 || released_ < wanted) return false;
  ring_.control->wanted_tail = 0;
  return true;
}

bool RingConsumer::arm(size_t bytes) {
  // Not more than half: a producer that finds no room for its frame has then passed this mark.
  const size_t mark = std::clamp(bytes, size_t{1}, ring_.capacity / 2);
  if (available() >= mark) return true;
  ring_.control->wanted_head = position_ + mark;
  if (available() < mark) return false;
  disarm();
  return true;
}

// --- memory ---

RingMemory::RingMemory(int fd) {
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals && fstat(fd, &info) == 0;
  const size_t size = sealed ? static_cast<size_t>(info.st_size) : 0;
  capacity_ = size > kPage ? (size - kPage) / 2 : 0;
  if (!std::has_single_bit(capacity_) || capacity_ < kPage || capacity_ > kMaxRing ||
      size != kPage + 2 * capacity_) {
    close(fd);
    refuse("expected the sealed memory file of two rings, got another file");
  }
  map(fd);
  close(fd);
}

void RingMemory::map(int fd) {
  const size_t span = kPage + 4 * capacity_;
  void* base = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) close_and_throw(fd, "[shm] mmap of rings");
  base_ = static_cast<std::byte*>(base);
  const auto place = [&](size_t at, size_t bytes, size_t offset) {
    return mmap(base_ + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                fd, static_cast<off_t>(offset)) != MAP_FAILED;
  };
  bool mapped = place(0, kPage, 0);
  for (size_t number = 0; number < 2; ++number)
    for (size_t copy = 0; copy < 2; ++copy)
      mapped = mapped && place(kPage + (2 * number + copy) * capacity_, capacity_,
                               kPage + number * capacity_);
  if (mapped) return;
  const int error = errno;
  unmap();
  errno = error;
  close_and_throw(fd, "[shm] mmap of rings");
}

void RingMemory::unmap() { munmap(base_, kPage + 4 * capacity_); }

RingMemory::~RingMemory() { unmap(); }

Ring RingMemory::ring(int number) const {
  auto* controls = reinterpret_cast<RingControl*>(base_);
  return {controls + number, base_ + kPage + static_cast<size_t>(2 * number) * capacity_,
          capacity_};
}

int make_ring_memory(size_t ring_bytes) {
  const size_t capacity = std::bit_ceil(std::max(ring_bytes, kPage));
  if (capacity > kMaxRing)
    throw Error(ErrorCode::config, "[shm] expected a ring of at most " + std::to_string(kMaxRing) +
                                       " bytes, got " + std::to_string(ring_bytes));
  const auto size = static_cast<off_t>(kPage + 2 * capacity);
  const int fd = memfd_create("phub-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("[shm] memfd_create", errno);
  // Allocated now: a full machine is an error here, not a SIGBUS at some later write.
  if (ftruncate(fd, size) != 0 || fallocate(fd, 0, 0, size) != 0)
    close_and_throw(fd, "[shm] memory for rings");
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) close_and_throw(fd, "[shm] seal rings");
  return fd;
}

}  // namespace phub
