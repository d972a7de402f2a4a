// Mapped memory. Shared memory is a memory file (memfd) made by the server: preallocated, so that
// a full machine is an error and not a SIGBUS; sealed, so that nobody can shrink it under a
// reader. It has no name and is gone with its last user, whoever is killed.
#pragma once

#include <cstddef>
#include <memory>

#include "error.h"

namespace phub {

class Memory {
 public:
  enum class Access { read_write, read_only, copy_on_write };

  static std::shared_ptr<Memory> anonymous(size_t bytes);  // private, zeroed, huge pages asked for
  // A new sealed memory file. `others`: what those may do who get its descriptor.
  static std::shared_ptr<Memory> shared(size_t bytes, Access others);
  // Maps a received memory file (takes over fd). Refuses one that is not sealed or too small.
  static std::shared_ptr<Memory> attach(int fd, size_t bytes, Access access);

  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_; }  // of a memory file made here, until it is released; else -1
  void release_fd();  // all who shall have it have it: the mapping is enough
  // For copy_on_write: drops this process's own changes and shows the file again.
  void revert();

 private:
  Memory(std::byte* data, size_t size, size_t mapped, int fd)
      : data_(data), size_(size), mapped_(mapped), fd_(fd) {}
  std::byte* data_;
  size_t size_, mapped_;
  int fd_;
};

}  // namespace phub
