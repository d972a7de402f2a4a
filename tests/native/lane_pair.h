// Two connected lanes of either transport in one process, for tests.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "lane.h"
#include "poller.h"

namespace test {

using namespace phub;

struct Received {
  Header header;
  std::vector<std::byte> payload;
  bool placed;  // it was written to a destination
};

// Keeps everything that arrives.
class Recorder : public Sink {
 public:
  std::byte* destination(Lane&, const Header& header) override {
    if (!place || !place(header)) return nullptr;
    target.resize(header.length);
    return target.data();
  }
  void frame(Lane& lane, const Header& header, const std::byte* payload) override {
    const bool placed = header.length > 0 && payload == target.data();
    if (!placed && header.length > 0) CHECK(reinterpret_cast<uintptr_t>(payload) % 8 == 0);
    if (on_frame) on_frame(lane, header, payload);
    if (keep) frames.push_back({header, {payload, payload + header.length}, placed});
    ++count;
    bytes += header.length;
  }
  void closed(Lane&, const Error& why) override {
    ++closes;
    error = why;
  }

  std::function<bool(const Header&)> place;  // which frames get a destination
  std::function<void(Lane&, const Header&, const std::byte*)> on_frame;
  bool keep = true;
  std::vector<Received> frames;
  std::vector<std::byte> target;
  size_t count = 0, bytes = 0;
  int closes = 0;
  Error error{ErrorCode::internal, ""};
};

// Two connected TCP sockets on loopback.
inline std::array<int, 2> tcp_sockets() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener, any, length) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, any, &length) == 0);
  const int left = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(left, any, length) == 0);
  const int right = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  CHECK(right >= 0);
  close(listener);
  return {left, right};
}

inline std::array<int, 2> unix_sockets() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {ends[0], ends[1]};
}

struct Transport {
  const char* name;
  bool bells = true;  // shm: eventfds, else the socket wakes
};
inline constexpr Transport kTransports[] = {{"tcp"}, {"shm"}, {"shm", false}};

// One end, with its poller.
struct End {
  Poller poller;
  std::unique_ptr<Lane> lane;
  Recorder sink;
  std::vector<Lane*> ready;

  void attach(std::unique_ptr<Lane> made) {
    lane = std::move(made);
    poller.add(*lane);
  }
  bool step(size_t budget = 1 << 20) {
    poller.wait(0, ready);
    return lane->progress(sink, budget);
  }
  // As an owner does: moves the lane, sleeps while there is nothing to do, until `done`.
  void drive(const std::function<bool()>& done, size_t watermark = 1, int timeout_ms = 10000) {
    bool watched = false;
    while (!done()) {
      if (step() || lane->is_closed()) continue;
      if (lane->wants_write() != watched) poller.watch_write(*lane, watched = !watched);
      if (!lane->arm(watermark)) {
        const auto start = std::chrono::steady_clock::now();
        poller.wait(timeout_ms, ready);
        const std::chrono::duration<double, std::milli> slept =
            std::chrono::steady_clock::now() - start;
        CHECK(slept.count() < timeout_ms);  // else a wake-up was lost
      }
      lane->disarm();
    }
    if (watched && !lane->is_closed()) poller.watch_write(*lane, false);
  }
};

struct Pair {
  End left, right;

  explicit Pair(const Transport& transport, size_t max_payload = 64 << 10, size_t ring = 0) {
    if (std::string(transport.name) == "tcp") {
      const auto sockets = tcp_sockets();
      left.attach(make_tcp_lane(sockets[0], {}, max_payload));
      right.attach(make_tcp_lane(sockets[1], {}, max_payload));
      return;
    }
    const auto sockets = unix_sockets();
    const int memory = make_ring_memory(ring ? ring : 2 * (max_payload + 64));
    const auto bell = [&](End& end) { return transport.bells ? dup(end.poller.bell()) : -1; };
    left.attach(make_shm_lane(sockets[0], dup(memory), bell(right), true, max_payload));
    right.attach(make_shm_lane(sockets[1], memory, bell(left), false, max_payload));
  }

  // Moves both ends until nothing moves any more.
  void settle() {
    int quiet = 0;  // TCP on loopback delivers in softirq: look a few times
    while (quiet < 3) quiet = left.step() | right.step() ? 0 : quiet + 1;
  }
};

inline Header header(FrameKind kind, uint32_t id, size_t length, uint32_t step = 0) {
  return {kind, 0, 7, id, step, static_cast<uint32_t>(length)};
}

inline std::vector<std::byte> pattern(size_t length, uint32_t seed) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i)
    bytes[i] = static_cast<std::byte>(seed * 31 + i * 7 + (i >> 8));
  return bytes;
}

}  // namespace test
