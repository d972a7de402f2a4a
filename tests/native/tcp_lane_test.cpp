// What is particular to lanes over TCP.
#include <netinet/tcp.h>

#include <random>
#include <utility>

#include "lane_pair.h"

using namespace test;

namespace {

std::vector<std::byte> encode(uint32_t frames, std::mt19937& random) {
  std::vector<std::byte> stream;
  for (uint32_t i = 0; i < frames; ++i) {
    const Header head = header(FrameKind::data, i, random() % 50);
    const auto* bytes = reinterpret_cast<const std::byte*>(&head);
    const auto payload = pattern(head.length, i);
    stream.insert(stream.end(), bytes, bytes + sizeof head);
    stream.insert(stream.end(), payload.begin(), payload.end());
  }
  return stream;
}

struct Raw {  // a lane whose other end is a plain socket
  End end;
  int socket;
  explicit Raw(size_t max_payload = 64 << 10) {
    const auto sockets = tcp_sockets();
    socket = sockets[0];
    const int one = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    end.attach(make_tcp_lane(sockets[1], {}, max_payload));
  }
  ~Raw() {
    if (socket >= 0) close(socket);
  }
};

}  // namespace

TEST(frames_may_be_cut_anywhere) {
  constexpr uint32_t kFrames = 60;
  for (unsigned seed = 0; seed < 6; ++seed) {
    std::mt19937 random(seed);
    const auto stream = encode(kFrames, random);
    Raw raw;
    raw.end.sink.place = [&](const Header& h) {
      return seed % 3 == 0 || (seed % 3 == 1 && h.id % 2 == 0);
    };
    for (size_t at = 0; at < stream.size();) {
      const size_t part = seed < 3 ? 1 : std::min<size_t>(1 + random() % 200, stream.size() - at);
      CHECK(write(raw.socket, stream.data() + at, part) == static_cast<ssize_t>(part));
      at += part;
      raw.end.step();
    }
    raw.end.drive([&] { return raw.end.sink.count == kFrames; });
    for (uint32_t i = 0; i < kFrames; ++i) {
      const Received& frame = raw.end.sink.frames[i];
      CHECK_EQUAL(frame.header.id, i);
      CHECK(frame.payload == pattern(frame.header.length, i));
    }
  }
}

TEST(an_end_inside_a_frame_is_told) {
  for (const size_t cut : {1, 15, 16, 40}) {
    Raw raw;
    std::vector<std::byte> stream(16 + 100);
    const Header head = header(FrameKind::data, 1, 100);
    std::memcpy(stream.data(), &head, sizeof head);
    CHECK(write(raw.socket, stream.data(), cut) == static_cast<ssize_t>(cut));
    close(std::exchange(raw.socket, -1));
    raw.end.drive([&] { return raw.end.lane->is_closed(); });
    CHECK_EQUAL(raw.end.sink.count, size_t{0});
    CHECK(raw.end.sink.error.code == ErrorCode::peer_lost);
    CHECK_CONTAINS(raw.end.sink.error.what(), "inside a frame");
  }
}

TEST(a_reset_is_a_lost_peer) {
  Raw raw;
  const linger hard{1, 0};
  setsockopt(raw.socket, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  close(std::exchange(raw.socket, -1));
  raw.end.drive([&] { return raw.end.lane->is_closed(); });
  CHECK(raw.end.sink.error.code == ErrorCode::peer_lost);
}

TEST(garbage_closes_only_its_lane) {
  std::mt19937 random(3);
  Raw good;
  for (int round = 0; round < 50; ++round) {
    Raw bad(1 << 10);
    std::vector<uint8_t> noise(4096);
    for (auto& byte : noise) byte = static_cast<uint8_t>(random());
    noise[0] = 200;
    CHECK(write(bad.socket, noise.data(), noise.size()) == 4096);
    bad.end.drive([&] { return bad.end.lane->is_closed(); });
    CHECK(bad.end.sink.error.code == ErrorCode::protocol);
  }
  const Header head = header(FrameKind::bye, 0, 0);
  CHECK(write(good.socket, &head, sizeof head) == sizeof head);
  good.end.drive([&] { return good.end.sink.count == 1; });
}

TEST(options_are_set_on_the_socket) {
  const auto sockets = tcp_sockets();
  TcpOptions options;
  options.congestion = "reno";
  options.keepalive_s = 12;
  const auto lane = make_tcp_lane(sockets[0], options, 1 << 10);
  CHECK(congestion_control(lane->fd()) == "reno");
  int value = 0;
  socklen_t size = sizeof value;
  CHECK(getsockopt(lane->fd(), IPPROTO_TCP, TCP_KEEPIDLE, &value, &size) == 0 && value == 4);
  CHECK(getsockopt(lane->fd(), IPPROTO_TCP, TCP_NODELAY, &value, &size) == 0 && value != 0);
  CHECK(getsockopt(lane->fd(), SOL_SOCKET, SO_KEEPALIVE, &value, &size) == 0 && value != 0);

  const auto fallback = make_tcp_lane(sockets[1], {}, 1 << 10);
  const std::string got = congestion_control(fallback->fd());
  CHECK(got == "cubic" || got == "reno");
}

TEST(an_unknown_congestion_control_is_refused) {
  const auto sockets = tcp_sockets();
  TcpOptions options;
  options.congestion = "no-such";
  const Error error = THROWN(Error, make_tcp_lane(sockets[0], options, 1 << 10));
  CHECK(error.code == ErrorCode::config);
  CHECK_CONTAINS(error.what(), "'no-such'");
  close(sockets[1]);
}

int main(int argc, char** argv) { return test::run(argc, argv); }
