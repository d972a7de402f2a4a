// A lane: an ordered, reliable stream of frames between two ends (worker and core, or two
// workers) over one transport. Thread contract: none; the owner calls every method under its own
// lock or on its own thread, and a Sink is called from inside `progress` only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "error.h"
#include "wire.h"

namespace phub {

class Lane;

inline constexpr size_t kNothingAwaited = SIZE_MAX;  // see Sink::awaited

// Where received frames go.
class Sink {
 public:
  virtual ~Sink() = default;
  // Where the payload of `header` shall be written, or nullptr: show it in place to `frame`.
  // Called once per frame with length > 0, before its payload is read. May throw Error: the lane
  // is then closed with it.
  virtual std::byte* destination(Lane& lane, const Header& header) = 0;
  // A whole frame. `payload` is what `destination` returned, or a view valid during this call and
  // aligned to 8 bytes at least. A view on shm may still be written by the other end: copy before
  // checking anything in it. May throw Error: the lane is then closed with it.
  virtual void frame(Lane& lane, const Header& header, const std::byte* payload) = 0;
  // The lane is closed: by the other end (`bye` seen or not), by a broken frame, or by `frame`'s
  // throw. Called once. The sink must not destroy the lane in here.
  virtual void closed(Lane& lane, const Error& why) = 0;
  // Frames that had been queued have left.
  virtual void flushed(Lane&) {}
  // Asked before the owner sleeps: how many bytes must arrive on this lane before there is anything
  // to do? Fewer wake-ups. On shm other kinds of frames than bulk data always wake; on tcp only
  // so many bytes do, and the end.
  virtual size_t awaited(const Lane&) { return 1; }
};

struct LaneCounters {
  uint64_t bytes_sent = 0;      // payload and headers that left this end
  uint64_t bytes_received = 0;
  uint64_t wakeups = 0;         // doorbells rung for the other end

  LaneCounters& operator+=(const LaneCounters& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    wakeups += other.wakeups;
    return *this;
  }
};

inline constexpr double kLifeSeconds = 2;

class Lane {
 public:
  virtual ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Queues a frame and tries to move it at once. `payload` is borrowed: it must stay unchanged
  // until the frame has left, which `unsent` (if given) tells: it is incremented now when the
  // frame could not leave at once, and decremented when it has left (or the lane closed).
  // A closed lane drops the frame.
  virtual void send(const Header& header, const void* payload, size_t* unsent = nullptr) = 0;
  // As `send`, with a copy of the payload: for small control frames.
  void send_copy(const Header& header, const void* payload);

  // Moves what can be moved both ways without blocking, at most about `budget` received bytes;
  // true when anything moved. Looks at its descriptor only when `fd_ready`: its owner calls
  // Poller::wait (without sleeping, when there is other work) before each round.
  virtual bool progress(Sink& sink, size_t budget) = 0;

  // Bytes that a frame with so much payload takes in the lane, in the units of `arm`.
  virtual size_t footprint(size_t length) const { return sizeof(Header) + length; }

  // Before its owner sleeps in poll: asks to be woken when at least `bytes` have arrived (or less,
  // if the lane cannot hold as much), or queued frames can move on. True: there is something to do
  // already, do not sleep. Not needed for lanes whose fd tells (tcp); then it returns false.
  virtual bool arm(size_t bytes) = 0;
  virtual void disarm() = 0;

  // What to watch in epoll. tcp: the socket. shm: the Unix socket, whose end tells that the other
  // process is gone. Stays open (and its number taken) until the lane is destroyed.
  virtual int fd() const = 0;
  virtual bool wants_write() const = 0;  // watch for EPOLLOUT too
  virtual const char* transport() const = 0;  // "shm" | "tcp"

  bool idle() const { return queue_.empty(); }  // no frame is queued for sending
  size_t queued() const { return queue_.size(); }  // frames
  // Nothing is lost when this end goes away now: what was sent has left, on tcp for the other host.
  virtual bool delivered() const { return idle(); }
  // Nothing more will be sent: the other end sees the end once it has taken what was. Receiving
  // goes on, since a connection with unread data would be reset, and what was sent with it.
  virtual void end_sending() = 0;
  // Called by its owner every kLifeSeconds or so: closes a lane whose other host is silent.
  virtual void check_life(Sink&) {}
  bool is_closed() const { return closed_; }
  // Drops what is queued, ends the connection and tells the sink; no effect when closed already.
  void close(const Error& why, Sink& sink);

  LaneCounters counters;
  int peer = -1;  // rank at the other end (worker) or -1 (core)
  void* owner = nullptr;  // free for the owner's bookkeeping
  // Set by an owner that queues many frames before it calls `progress`: a lane for which a call of
  // the system is dear (tcp) then lets frames gather, up to a limit.
  bool corked = false;
  bool fd_ready = true;  // set by the poller: there was an event on fd() since the lane looked

 protected:
  Lane() = default;

  struct Outgoing {
    Header header;
    const std::byte* payload;
    size_t* unsent;
  };
  void enqueue(const Header& header, const void* payload, size_t* unsent);
  void dequeue();  // the front of the queue has left
  void drop_queue();  // nothing more can leave
  virtual void shut_down() = 0;  // ends the connection; called once, by `close`

  std::deque<Outgoing> queue_;

 private:
  struct Copy {
    std::unique_ptr<std::byte[]> data;
    size_t unsent = 0;
  };
  std::deque<Copy> copies_;
  bool closed_ = false;
};

// Throws Error(protocol) when `header` cannot begin a frame of this protocol.
void check_header(const Header& header, size_t max_payload);

struct TcpOptions {
  std::string congestion;  // "" = cubic if allowed, else reno, else the system's
  int buffer_bytes = 0;  // SO_SNDBUF / SO_RCVBUF; 0 = the kernel tunes them
  int keepalive_s = 30;  // a silent, unreachable host is an error after this time
  int unsent_bytes = 0;  // that the kernel takes beyond what is under way; 0 = megabytes
};

// Takes over a connected, authenticated socket (any blocking mode).
std::unique_ptr<Lane> make_tcp_lane(int fd, const TcpOptions& options, size_t max_payload);
// Sets a TCP socket's congestion control ("": see TcpOptions). Sockets are best told before they
// connect or listen: a connection that began with BBR goes on pacing by timer.
void choose_congestion(int fd, const std::string& wanted);
std::string congestion_control(int fd);  // the one in use

// Shared memory: two rings, one for each direction, in one sealed memory file made by the side
// that accepts. Takes over all three descriptors.
//   socket     connected Unix socket; its end tells that the other process is gone
//   memory     from make_ring_memory
//   peer_bell  eventfd of the other end's poller, rung when it sleeps and has asked to be woken.
//              -1: a byte on the socket does it, 1 us dearer. For an end that is not trusted: it
//              could make the write to its eventfd block.
//   first      true on the side that made the memory
std::unique_ptr<Lane> make_shm_lane(int socket, int memory, int peer_bell, bool first,
                                    size_t max_payload);
int make_ring_memory(size_t ring_bytes);  // a sealed memfd that holds two rings of ring_bytes

}  // namespace phub
