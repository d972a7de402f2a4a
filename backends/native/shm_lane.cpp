// A lane over shared memory: frames are copied into a ring once and used from there. The end of
// the Unix socket tells that the other process is gone; bytes on it only wake.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lane.h"
#include "shm_ring.h"

namespace phub {
namespace {

// Owns a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

class ShmLane final : public Lane {
 public:
  ShmLane(int socket, int memory, int peer_bell, bool first, size_t max_payload);

  void send(const Header& header, const void* payload, size_t* unsent) override;
  bool progress(Sink& sink, size_t budget) override;
  size_t footprint(size_t length) const override { return slot_bytes(length); }
  bool arm(size_t bytes) override;
  void disarm() override;
  void end_sending() override { shutdown(socket_.get(), SHUT_WR); }
  int fd() const override { return socket_.get(); }
  bool wants_write() const override { return false; }
  const char* transport() const override { return "shm"; }

 private:
  void shut_down() override { shutdown(socket_.get(), SHUT_RDWR); }

  bool flush();
  bool push(const Header& header, const void* payload);
  bool receive(Sink& sink, size_t budget);
  void deliver(Sink& sink, const Header& header, const std::byte* payload);
  void release();
  void look_at_socket();
  void ring_bell();

  const Descriptor socket_, peer_bell_;
  RingMemory memory_;
  RingProducer out_;
  RingConsumer in_;
  const size_t max_payload_;
  bool hung_up_ = false;  // the other process is gone; what it left in the ring still counts
};

ShmLane::ShmLane(int socket, int memory, int peer_bell, bool first, size_t max_payload)
    : socket_(socket),
      peer_bell_(peer_bell),
      memory_(memory),
      out_(memory_.ring(first ? 0 : 1)),
      in_(memory_.ring(first ? 1 : 0)),
      max_payload_(max_payload) {
  if (memory_.capacity() < 2 * slot_bytes(max_payload))
    throw Error(ErrorCode::protocol, "[shm] expected rings of at least " +
                                         std::to_string(2 * slot_bytes(max_payload)) +
                                         " bytes, got " + std::to_string(memory_.capacity()));
}

void ShmLane::ring_bell() {
  const uint64_t one = 1;
  // Failure needs no care: a full counter or socket wakes anyway, a broken one is found by reading.
  [[maybe_unused]] const ssize_t rung =
      peer_bell_.get() >= 0 ? write(peer_bell_.get(), &one, sizeof one)
                            : ::send(socket_.get(), &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  ++counters.wakeups;
}

// --- sending ---

bool ShmLane::push(const Header& header, const void* payload) {
  bool wake = false;
  if (!out_.push(header, payload, wake)) return false;
  counters.bytes_sent += sizeof header + header.length;
  if (wake) ring_bell();
  return true;
}

void ShmLane::send(const Header& header, const void* payload, size_t* unsent) {
  if (is_closed()) return;
  try {
    if (idle() && push(header, payload)) return;
  } catch (const Error&) {
    // A position is nonsense. `progress` meets it too, where there is a sink to tell.
  }
  enqueue(header, payload, unsent);
}

bool ShmLane::flush() {
  bool moved = false;
  while (!idle() && push(queue_.front().header, queue_.front().payload)) {
    dequeue();
    moved = true;
  }
  return moved;
}

// --- receiving ---

bool ShmLane::progress(Sink& sink, size_t budget) {
  if (is_closed()) return false;
  bool moved = false;
  try {
    if (fd_ready) look_at_socket();
    moved = flush();
    if (moved) sink.flushed(*this);
    const bool received = receive(sink, budget);
    if (hung_up_ && !received)
      throw Error(ErrorCode::peer_lost, "[shm] the other end closed the connection", peer);
    moved |= received;
  } catch (const Error& error) {
    close(error, sink);
    return true;
  } catch (const std::exception& error) {  // out of memory, say: the end of this lane only
    close(Error(ErrorCode::internal, std::string("[shm] ") + error.what()), sink);
    return true;
  }
  return moved;
}

bool ShmLane::receive(Sink& sink, size_t budget) {
  size_t received = 0;
  Header header;
  while (received < budget && !is_closed()) {
    const std::byte* payload = in_.pop(header, max_payload_);
    if (!payload) break;
    received += sizeof header + header.length;
    deliver(sink, header, payload);
    if (in_.unreleased() >= memory_.capacity() / 8) release();
  }
  if (in_.unreleased() > 0) release();
  counters.bytes_received += received;
  return received > 0;
}

void ShmLane::deliver(Sink& sink, const Header& header, const std::byte* payload) {
  std::byte* target = header.length > 0 ? sink.destination(*this, header) : nullptr;
  if (is_closed()) return;
  if (target) std::memcpy(target, payload, header.length);
  sink.frame(*this, header, target ? target : payload);
}

void ShmLane::release() {
  if (in_.release()) ring_bell();
}

void ShmLane::look_at_socket() {
  char rung[64];
  const ssize_t got = recv(socket_.get(), rung, sizeof rung, MSG_DONTWAIT);
  const bool nothing = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  fd_ready = false;  // the poller tells of more
  hung_up_ = got == 0 || (got < 0 && !nothing);
}

// --- sleeping ---

bool ShmLane::arm(size_t bytes) {
  if (is_closed()) return false;
  try {
    const bool room = !idle() && out_.arm();
    return in_.arm(bytes) || room;
  } catch (const Error&) {
    return true;  // as in `send`
  }
}

void ShmLane::disarm() {
  in_.disarm();
  out_.disarm();
}

}  // namespace

std::unique_ptr<Lane> make_shm_lane(int socket, int memory, int peer_bell, bool first,
                                    size_t max_payload) {
  return std::make_unique<ShmLane>(socket, memory, peer_bell, first, max_payload);
}

}  // namespace phub
