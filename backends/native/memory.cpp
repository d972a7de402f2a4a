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

// A preallocated memory file of `bytes`, or -1 with errno. Reserved huge pages are tried first.
int memory_file(size_t bytes, unsigned flags) {
  const int fd = memfd_create("phub", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
  if (fd < 0) return -1;
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
      fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0)
    return fd;
  const int number = errno;
  close(fd);
  errno = number;
  return -1;
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
  if (bytes >= kHugePage) fd = memory_file(mapped, MFD_HUGETLB);
  if (fd < 0) fd = memory_file(mapped, 0);
  if (fd < 0) throw system_error(describe("memfd", mapped), errno);
  void* data = map(mapped, MAP_SHARED, fd);
  // Sealed after our own mapping, which a seal against writing leaves as it is.
  const int seals = kSeals | (others == Access::read_write ? 0 : F_SEAL_FUTURE_WRITE);
  if (data == MAP_FAILED || fcntl(fd, F_ADD_SEALS, seals) != 0) {
    const int number = errno;
    if (data != MAP_FAILED) munmap(data, mapped);
    close(fd);
    throw system_error(describe("mmap", mapped), number);
  }
  madvise(data, mapped, MADV_HUGEPAGE);
  madvise(data, mapped, MADV_POPULATE_WRITE);  // page tables now, not inside the first step
  return std::shared_ptr<Memory>(new Memory(static_cast<std::byte*>(data), bytes, mapped, fd));
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
  if (data == MAP_FAILED) {
    const int number = errno;
    close(fd);
    throw system_error(describe("mmap", mapped), number);
  }
  madvise(data, mapped, MADV_HUGEPAGE);
  if (access == Access::read_write)
    madvise(data, mapped, MADV_POPULATE_WRITE);
  else
    madvise(data, mapped, MADV_POPULATE_READ);
  return std::shared_ptr<Memory>(new Memory(static_cast<std::byte*>(data), bytes, mapped, fd));
}

void Memory::revert() {
  madvise(data_, mapped_, MADV_DONTNEED);
  madvise(data_, mapped_, MADV_POPULATE_READ);
}

Memory::~Memory() {
  munmap(data_, mapped_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace phub
