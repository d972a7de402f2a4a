// A lane over a TCP socket. Sending gathers headers and payloads of many queued frames in one
// call. Receiving has two ways: payload that has a destination is read straight into it, together
// with the next header; other frames are read many at a time into a buffer and shown there.
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "lane.h"

namespace phub {
namespace {

constexpr size_t kFramesPerCall = 64;
constexpr size_t kCorkedFrames = 16;        // with chunks of 32 KiB, 512 KiB a call
constexpr size_t kBufferBytes = 256 << 10;  // stays in the L2 cache
constexpr size_t kMaxLowWater = 128 << 10;  // less than any socket buffer holds
constexpr size_t kLargeFrame = 64 << 10;     // read alone, so that no part of the next is moved
constexpr size_t kViewAlignment = 8;        // the largest element type

void set_option(int fd, int level, int name, int value, const char* what) {
  if (setsockopt(fd, level, name, &value, sizeof value) != 0)
    throw system_error(std::string("[tcp] setsockopt ") + what, errno);
}

bool set_congestion(int fd, const std::string& name) {
  return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

// An unreachable other end is an error after `seconds`: found by the kernel while nothing is sent
// to it, else by `check_life`. TCP_USER_TIMEOUT would do for both, but it also ends a connection
// to a process that is alive and does not read for so long, which is a stall and no loss.
void set_keepalive(int fd, int seconds) {
  const int idle = std::max(1, seconds / 3), interval = std::max(1, seconds / 6);
  const int probes = std::max(1, (seconds - idle) / interval);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle, "TCP_KEEPIDLE");
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval, "TCP_KEEPINTVL");
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT");
}

class TcpLane final : public Lane {
 public:
  TcpLane(int fd, size_t max_payload, int keepalive_s);
  ~TcpLane() override { ::close(fd_); }

  void send(const Header& header, const void* payload, size_t* unsent) override;
  bool progress(Sink& sink, size_t budget) override;
  bool arm(size_t bytes) override;
  void disarm() override { set_low_water(1); }
  int fd() const override { return fd_; }
  bool wants_write() const override { return !idle(); }
  bool delivered() const override;
  void end_sending() override { shutdown(fd_, SHUT_WR); }
  void check_life(Sink& sink) override;
  const char* transport() const override { return "tcp"; }

 private:
  void shut_down() override { shutdown(fd_, SHUT_RDWR); }

  bool flush();
  size_t gather(iovec* parts, size_t& bytes) const;
  void left(size_t bytes);

  bool receive(Sink& sink, size_t budget);
  size_t space() const;
  ssize_t read_some(size_t& asked);
  bool take_header(Sink& sink);
  bool take_payload(Sink& sink);
  void set_low_water(size_t bytes);
  const std::byte* view();
  void move_rest_to_front();
  Error ended(const std::string& how) const;

  const int fd_;
  const size_t max_payload_;
  const int keepalive_s_;  // 0: silence is borne

  // sending
  bool full_ = false;                // the socket took less than there was
  bool untold_ = false;              // `send` has flushed, which the sink was not told yet
  size_t front_sent_ = 0;            // bytes of the queue's front that have left
  std::optional<Error> send_error_;  // nothing more can be sent; what was received still counts

  // receiving
  const size_t capacity_;
  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;   // bytes in buffer_ that are not taken yet
  Header header_{};              // of the frame whose payload is being received,
  bool has_header_ = false;      // if there is one
  std::byte* target_ = nullptr;  // its destination, or nullptr: shown in buffer_
  size_t filled_ = 0;            // bytes that stand in target_
  size_t low_water_ = 1;         // bytes below which the socket does not count as readable
  bool direct_ = false;          // the last frame had a destination: the next one likely too
};

TcpLane::TcpLane(int fd, size_t max_payload, int keepalive_s)
    : fd_(fd),
      max_payload_(max_payload),
      keepalive_s_(keepalive_s),
      capacity_(std::max(kBufferBytes, 2 * (max_payload + sizeof(Header)))),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(capacity_)) {}

// --- sending ---

void TcpLane::send(const Header& header, const void* payload, size_t* unsent) {
  if (is_closed() || send_error_) return;
  const bool first = idle();
  enqueue(header, payload, unsent);
  if (full_ || (corked && queue_.size() < kCorkedFrames)) return;
  if (flush() && !first) untold_ = true;
}

// Fills `parts` with the frames at the front of the queue; returns how many parts.
size_t TcpLane::gather(iovec* parts, size_t& bytes) const {
  size_t count = 0, skip = front_sent_;
  bytes = 0;
  const auto add = [&](const void* data, size_t length) {
    const size_t cut = std::min(skip, length);
    skip -= cut;
    if (length == cut) return;
    parts[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + cut, length - cut};
    bytes += length - cut;
  };
  const size_t frames = std::min(queue_.size(), kFramesPerCall);
  for (size_t i = 0; i < frames; ++i) {
    add(&queue_[i].header, sizeof(Header));
    add(queue_[i].payload, queue_[i].header.length);
  }
  return count;
}

// Takes `bytes` off the front of the queue.
void TcpLane::left(size_t bytes) {
  counters.bytes_sent += bytes;
  front_sent_ += bytes;
  while (!idle()) {
    const size_t frame = sizeof(Header) + queue_.front().header.length;
    if (front_sent_ < frame) return;
    front_sent_ -= frame;
    dequeue();
  }
}

bool TcpLane::delivered() const {
  int unacknowledged = 0;
  return idle() && (ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0);
}

bool TcpLane::flush() {
  bool moved = false;
  full_ = false;
  while (!idle() && !full_) {
    iovec parts[2 * kFramesPerCall];
    size_t bytes = 0;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = gather(parts, bytes);
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      full_ = errno == EAGAIN || errno == EWOULDBLOCK;
      if (full_) break;
      send_error_ = system_error("[tcp] send", errno);
      drop_queue();
      fd_ready = true;  // look for the end at once
      break;
    }
    left(static_cast<size_t>(sent));
    moved = true;
    full_ = static_cast<size_t>(sent) < bytes;
  }
  return moved;
}

// --- receiving ---

bool TcpLane::progress(Sink& sink, size_t budget) {
  if (is_closed()) return false;
  bool moved = false;
  try {
    moved = !idle() && flush();
    if (std::exchange(untold_, false) || moved) sink.flushed(*this);
    moved |= receive(sink, budget);
    if (send_error_ && !fd_ready) close(*send_error_, sink);
  } catch (const Error& error) {
    close(error, sink);
    return true;
  } catch (const std::exception& error) {  // out of memory, say: the end of this lane only
    close(Error(ErrorCode::internal, std::string("[tcp] ") + error.what()), sink);
    return true;
  }
  return moved || is_closed();
}

// --- sleeping ---

// What has arrived of an unfinished frame is among the bytes expected, but will not come again.
bool TcpLane::arm(size_t bytes) {
  if (bytes == kNothingAwaited) bytes = 1;  // but any frame may be an error that must wake
  const size_t here = end_ - begin_ + (has_header_ ? sizeof(Header) + filled_ : 0);
  set_low_water(bytes > here ? std::min(bytes - here, kMaxLowWater) : 1);
  return untold_;
}

void TcpLane::set_low_water(size_t bytes) {
  if (bytes == low_water_) return;
  const int value = static_cast<int>(bytes);
  if (setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value) == 0) low_water_ = bytes;
}

// A living kernel acknowledges, also for a process that does not read.
void TcpLane::check_life(Sink& sink) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (is_closed() || keepalive_s_ <= 0) return;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return;
  const bool asked_in_vain = info.tcpi_retransmits > 1 || info.tcpi_probes > 1;
  if (!asked_in_vain || info.tcpi_last_ack_recv < static_cast<uint32_t>(keepalive_s_) * 1000)
    return;
  close(Error(ErrorCode::peer_lost,
              "[tcp] the other host has been silent for " + std::to_string(keepalive_s_) + " s",
              peer),
        sink);
}

// --- receiving, in detail ---

Error TcpLane::ended(const std::string& how) const {
  const bool inside = has_header_ || end_ > begin_;
  return Error(ErrorCode::peer_lost,
               "[tcp] the other end " + how + (inside ? " inside a frame" : ""), peer);
}

bool TcpLane::receive(Sink& sink, size_t budget) {
  size_t received = 0;
  while (fd_ready && received < budget && !is_closed()) {
    size_t asked = 0;
    const ssize_t got = read_some(asked);
    if (got == 0) throw ended("closed the connection");
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK)
        throw ended("broke the connection (" + std::string(std::strerror(errno)) + ")");
      fd_ready = false;
      break;
    }
    fd_ready = static_cast<size_t>(got) == asked;  // else the socket is empty
    received += static_cast<size_t>(got);
    while (!is_closed() && take_header(sink) && take_payload(sink)) {
    }
    move_rest_to_front();
  }
  counters.bytes_received += received;
  return received > 0;
}

// How much to read into the buffer.
size_t TcpLane::space() const {
  if (direct_) return sizeof(Header) - (end_ - begin_);
  if (has_header_ && header_.length >= kLargeFrame)
    return header_.length + sizeof(Header) - (end_ - begin_);
  return capacity_ - end_;
}

// One read: into the destination and then the next header, or into the buffer.
ssize_t TcpLane::read_some(size_t& asked) {
  iovec parts[2];
  int count = 0;
  if (target_) parts[count++] = {target_ + filled_, header_.length - filled_};
  parts[count++] = {buffer_.get() + end_, space()};
  for (int i = 0; i < count; ++i) asked += parts[i].iov_len;
  const ssize_t got = readv(fd_, parts, count);
  if (got <= 0) return got;
  const size_t payload = target_ ? std::min(static_cast<size_t>(got), parts[0].iov_len) : 0;
  filled_ += payload;
  end_ += static_cast<size_t>(got) - payload;
  return got;
}

// False: the next header is not there yet.
bool TcpLane::take_header(Sink& sink) {
  if (has_header_) return true;
  if (end_ - begin_ < sizeof(Header)) return false;
  std::memcpy(&header_, buffer_.get() + begin_, sizeof(Header));
  begin_ += sizeof(Header);
  check_header(header_, max_payload_);
  target_ = header_.length > 0 ? sink.destination(*this, header_) : nullptr;
  direct_ = target_ != nullptr;
  filled_ = 0;
  has_header_ = true;
  return !is_closed();
}

// False: the payload is not complete yet.
bool TcpLane::take_payload(Sink& sink) {
  const size_t length = header_.length;
  if (target_) {
    const size_t count = std::min(length - filled_, end_ - begin_);
    if (count > 0) std::memcpy(target_ + filled_, buffer_.get() + begin_, count);
    begin_ += count;
    filled_ += count;
    if (filled_ < length) return false;
  } else if (end_ - begin_ < length) {
    return false;
  }
  const std::byte* payload = target_ ? target_ : view();
  if (!target_) begin_ += length;
  target_ = nullptr;
  has_header_ = false;
  sink.frame(*this, header_, payload);
  return true;
}

// The payload at begin_, aligned: after a frame of odd length it is moved down over its header.
const std::byte* TcpLane::view() {
  const size_t down = begin_ % kViewAlignment;
  if (down == 0) return buffer_.get() + begin_;
  std::memmove(buffer_.get() + begin_ - down, buffer_.get() + begin_, header_.length);
  return buffer_.get() + begin_ - down;
}

// An incomplete frame goes to the front of the buffer, where it has room (and is aligned).
void TcpLane::move_rest_to_front() {
  const size_t rest = end_ - begin_;
  if (begin_ > 0 && rest > 0) std::memmove(buffer_.get(), buffer_.get() + begin_, rest);
  begin_ = 0;
  end_ = rest;
}

}  // namespace

std::unique_ptr<Lane> make_tcp_lane(int fd, const TcpOptions& options, size_t max_payload) {
  auto lane = std::make_unique<TcpLane>(fd, max_payload, options.keepalive_s);  // owns fd from here
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  if (options.unsent_bytes > 0)
    set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, options.unsent_bytes, "TCP_NOTSENT_LOWAT");
  choose_congestion(fd, options.congestion);
  if (options.buffer_bytes > 0) {
    set_option(fd, SOL_SOCKET, SO_SNDBUF, options.buffer_bytes, "SO_SNDBUF");
    set_option(fd, SOL_SOCKET, SO_RCVBUF, options.buffer_bytes, "SO_RCVBUF");
  }
  if (options.keepalive_s > 0) set_keepalive(fd, options.keepalive_s);
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    throw system_error("[tcp] fcntl O_NONBLOCK", errno);
  return lane;
}

void choose_congestion(int fd, const std::string& wanted) {
  if (wanted.empty()) {
    // BBR, the default of some systems, reaches half of cubic's rate on a short path.
    if (!set_congestion(fd, "cubic")) set_congestion(fd, "reno");
  } else if (!set_congestion(fd, wanted)) {
    throw Error(ErrorCode::config, "[tcp] expected a congestion control of this system, got '" +
                                       wanted + "'; see net.ipv4.tcp_allowed_congestion_control");
  }
}

std::string congestion_control(int fd) {
  char name[16] = {};
  socklen_t length = sizeof name;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) != 0)
    throw system_error("[tcp] getsockopt TCP_CONGESTION", errno);
  return std::string(name, strnlen(name, sizeof name));
}

}  // namespace phub
