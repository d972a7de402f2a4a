#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace phub {
namespace {

constexpr size_t kHugePage = 2u << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::string describe(const char* call, size_t bytes) {
  return "[memory] " + std::string(call) + " of " + std::to_string(bytes) + " bytes";
}

void* map(size_t bytes, int flags, int fd, int protection = PROT_READ | PROT_WRITE) {
  return mmap(nullptr, bytes, protection, flags, fd, 0);
}

// Maps a new memory file of `bytes` with all its pages there; nullptr with errno if it cannot be had.
// Huge pages are asked for before the first page is made: later they would not be given.
void* make_file(size_t bytes, unsigned flags, int& fd) {
  fd = memfd_create("phub", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0) data = map(bytes, MAP_SHARED, fd);
  if (data != MAP_FAILED) {
    madvise(data, bytes, MADV_HUGEPAGE);
    madvise(data, bytes, MADV_POPULATE_WRITE);  // page tables now, not inside the first step
    if (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0) return data;
  }
  const int number = errno;
  if (data != MAP_FAILED) munmap(data, bytes);
  close(fd);
  errno = number;
  return nullptr;
}

}  // namespace

std::shared_ptr<Memory> Memory::anonymous(size_t bytes) {
  const size_t mapped = round_up(bytes ? bytes : 1, bytes >= kHugePage ? kHugePage : 4096);
  void* data = map(mapped, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (data == MAP_FAILED) throw system_error(describe("mmap", mapped), errno);
  madvise(data, mapped, MADV_HUGEPAGE);  // refused where the kernel has none: plain pages then
  return std::shared_ptr<Memory>(new Memory(static_cast<std::byte*>(data), bytes, mapped, -1));
}

std::shared_ptr<Memory> Memory::shared(size_t bytes, Access others) {
  const size_t mapped = round_up(bytes ? bytes : 1, bytes >= kHugePage ? kHugePage : 4096);
  int fd = -1;
  void* data = bytes >= kHugePage ? make_file(mapped, MFD_HUGETLB, fd) : nullptr;
  if (!data) data = make_file(mapped, 0, fd);
  if (!data) throw system_error(describe("memfd", mapped), errno);
  std::shared_ptr<Memory> memory(new Memory(static_cast<std::byte*>(data), bytes, mapped, fd));
  // Sealed after our own mapping, which a seal against writing leaves as it is.
  const int seals = kSeals | (others == Access::read_write ? 0 : F_SEAL_FUTURE_WRITE);
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) throw system_error(describe("sealing", mapped), errno);
  return memory;
}

std::shared_ptr<Memory> Memory::attach(int fd, size_t bytes, Access access) {
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &info) != 0 || (seals & kSeals) != kSeals ||
      static_cast<size_t>(info.st_size) < bytes) {
    close(fd);
    throw Error(ErrorCode::protocol, "[memory] expected a sealed memory file of at least " +
                                         std::to_string(bytes) + " bytes, got another file");
  }
  const size_t mapped = static_cast<size_t>(info.st_size);
  const int flags = access == Access::copy_on_write ? MAP_PRIVATE : MAP_SHARED;
  const int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = map(mapped, flags, fd, protection);
  const int number = errno;
  close(fd);  // the mapping is enough
  if (data == MAP_FAILED) throw system_error(describe("mmap", mapped), number);
  madvise(data, mapped, MADV_HUGEPAGE);
  madvise(data, mapped, access == Access::read_write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
  return std::shared_ptr<Memory>(new Memory(static_cast<std::byte*>(data), bytes, mapped, -1));
}

void Memory::release_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Memory::revert() {
  madvise(data_, mapped_, MADV_DONTNEED);
  madvise(data_, mapped_, MADV_POPULATE_READ);
}

Memory::~Memory() {
  munmap(data_, mapped_);
  release_fd();
}

}  // namespace phub
