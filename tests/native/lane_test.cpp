// Lanes of both transports: what goes in comes out, whatever the sizes and the timing, and
// whatever else arrives closes the lane with a typed error.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <new>

#include <random>

#include "lane_pair.h"

using namespace test;

namespace {

constexpr size_t kSizes[] = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096, 32 << 10, 65535, 64 << 10};

void check_frame(const Received& frame, uint32_t id, size_t length) {
  CHECK_EQUAL(frame.header.id, id);
  CHECK_EQUAL(static_cast<size_t>(frame.header.length), length);
  CHECK_EQUAL(frame.header.sender, 7);
  CHECK(frame.payload == pattern(length, id));
}

void exchange_sizes(const Transport& transport, const std::function<bool(const Header&)>& place) {
  Pair pair(transport);
  pair.right.sink.place = place;
  uint32_t id = 0;
  for (size_t length : kSizes) {
    const auto data = pattern(length, id);
    pair.left.lane->send(header(FrameKind::push, id++, length), data.data(), nullptr);
    pair.right.drive([&] { return pair.right.sink.count == id; });
  }
  for (uint32_t i = 0; i < id; ++i) {
    check_frame(pair.right.sink.frames[i], i, kSizes[i]);
    CHECK_EQUAL(pair.right.sink.frames[i].placed,
                kSizes[i] > 0 && place(header(FrameKind::push, i, kSizes[i])));
  }
}

}  // namespace

TEST(frames_of_all_sizes_shown_or_placed) {
  for (const Transport& transport : kTransports) {
    exchange_sizes(transport, [](const Header&) { return false; });
    exchange_sizes(transport, [](const Header&) { return true; });
    exchange_sizes(transport, [](const Header& h) { return h.id % 3 == 1; });
  }
}

TEST(many_frames_queue_and_keep_their_order) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    std::mt19937 random(1);
    std::vector<std::vector<std::byte>> data;
    size_t unsent = 0, total = 0;
    for (uint32_t i = 0; i < 3000; ++i) {
      const size_t length = i % 10 == 0 ? 64 << 10 : random() % 3000;
      data.push_back(pattern(length, i));
      total += length;
      pair.left.lane->send(header(FrameKind::data, i, length), data.back().data(), &unsent);
    }
    CHECK(unsent > 0 && !pair.left.lane->idle());
    pair.right.sink.place = [](const Header& h) { return h.id % 2 == 0; };
    while (pair.right.sink.count < data.size()) {
      pair.left.step();
      pair.right.step();
    }
    CHECK_EQUAL(unsent, size_t{0});
    CHECK(pair.left.lane->idle());
    for (uint32_t i = 0; i < data.size(); ++i)
      check_frame(pair.right.sink.frames[i], i, data[i].size());
    const size_t moved = total + data.size() * sizeof(Header);
    CHECK_EQUAL(pair.left.lane->counters.bytes_sent, moved);
    CHECK_EQUAL(pair.right.lane->counters.bytes_received, moved);
  }
}

TEST(both_directions_at_once) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const auto data = pattern(20000, 3);
    for (uint32_t i = 0; i < 200; ++i) {
      pair.left.lane->send(header(FrameKind::push, 3, data.size()), data.data(), nullptr);
      pair.right.lane->send(header(FrameKind::result, 3, data.size()), data.data(), nullptr);
    }
    while (pair.left.sink.count < 200 || pair.right.sink.count < 200) {
      pair.left.step();
      pair.right.step();
    }
    for (End* end : {&pair.left, &pair.right})
      for (const Received& frame : end->sink.frames) check_frame(frame, 3, data.size());
  }
}

TEST(a_copy_may_be_forgotten_at_once) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const auto big = pattern(64 << 10, 0);
    for (int i = 0; i < 200; ++i)
      pair.left.lane->send(header(FrameKind::push, 0, big.size()), big.data());
    CHECK(!pair.left.lane->idle());
    for (uint32_t i = 1; i < 50; ++i) {
      auto text = pattern(100, i);
      pair.left.lane->send_copy(header(FrameKind::open, i, text.size()), text.data());
    }
    while (pair.right.sink.count < 249) {
      pair.left.step();
      pair.right.step();
    }
    for (uint32_t i = 1; i < 50; ++i) check_frame(pair.right.sink.frames[199 + i], i, 100);
  }
}

TEST(a_budget_bounds_one_call) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport, 64 << 10, 4 << 20);
    const auto data = pattern(10000, 1);
    for (int i = 0; i < 100; ++i)
      pair.left.lane->send(header(FrameKind::push, 1, data.size()), data.data());
    pair.right.drive([&] { return pair.right.sink.count > 0; });  // so that all have arrived
    const size_t before = pair.right.sink.bytes;
    pair.right.step(20000);
    CHECK(pair.right.sink.bytes - before <= 20000 + (256 << 10));
    while (pair.right.sink.count < 100) {  // tcp: the socket has not taken all of it at once
      pair.left.step();
      pair.right.step();
    }
  }
}

TEST(broken_headers_close_the_lane) {
  for (const Transport& transport : kTransports) {
    for (const bool kind : {true, false}) {
      Pair pair(transport, 1 << 10), other(transport, 1 << 10);
      std::vector<std::byte> data(2 << 10);
      const Header wrong = kind ? header(static_cast<FrameKind>(77), 0, 16)
                                : header(FrameKind::push, 0, (1 << 10) + 1);
      pair.left.lane->send(wrong, data.data());
      pair.right.drive([&] { return pair.right.lane->is_closed(); });
      CHECK_EQUAL(pair.right.sink.closes, 1);
      CHECK(pair.right.sink.error.code == ErrorCode::protocol);
      CHECK_CONTAINS(pair.right.sink.error.what(), kind ? "unknown kind 77" : "a frame of 1025");
      CHECK_EQUAL(pair.right.sink.count, size_t{0});
      pair.left.drive([&] { return pair.left.lane->is_closed(); });  // the other end learns of it
      CHECK(pair.left.sink.error.code == ErrorCode::peer_lost);
      other.left.lane->send(header(FrameKind::push, 0, 100), data.data());
      other.right.drive([&] { return other.right.sink.count == 1; });
    }
  }
}

TEST(an_error_of_the_sink_closes_the_lane) {
  for (const Transport& transport : kTransports) {
    for (const bool in_frame : {true, false}) {
      Pair pair(transport);
      const auto data = pattern(100, 0);
      const auto refuse = [](uint32_t id) {
        if (id == 2) throw Error(ErrorCode::mismatch, "[test] no", 5);
      };
      if (in_frame)
        pair.right.sink.on_frame = [&](Lane&, const Header& h, const std::byte*) { refuse(h.id); };
      else
        pair.right.sink.place = [&](const Header& h) { return refuse(h.id), true; };
      for (uint32_t i = 0; i < 5; ++i)
        pair.left.lane->send(header(FrameKind::push, i, 100), data.data());
      pair.right.drive([&] { return pair.right.lane->is_closed(); });
      CHECK_EQUAL(pair.right.sink.count, size_t{2});
      CHECK_EQUAL(pair.right.sink.closes, 1);
      CHECK(pair.right.sink.error.code == ErrorCode::mismatch && pair.right.sink.error.rank == 5);
    }
  }
}

TEST(an_exception_of_another_kind_closes_the_lane_too) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    pair.right.sink.on_frame = [](Lane&, const Header&, const std::byte*) {
      throw std::bad_alloc();
    };
    pair.left.lane->send(header(FrameKind::push, 0, 0), nullptr);
    pair.right.drive([&] { return pair.right.lane->is_closed(); });
    CHECK_EQUAL(pair.right.sink.closes, 1);
    CHECK(pair.right.sink.error.code == ErrorCode::internal);
  }
}

TEST(a_sink_may_close_and_send) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const auto data = pattern(100, 0);
    pair.right.sink.on_frame = [&](Lane& lane, const Header& h, const std::byte*) {
      if (h.id == 1) lane.send(header(FrameKind::result, 9, 0), nullptr);
      if (h.id == 2) lane.close(Error(ErrorCode::auth, "[test] enough"), pair.right.sink);
    };
    for (uint32_t i = 0; i < 5; ++i)
      pair.left.lane->send(header(FrameKind::push, i, 100), data.data());
    pair.right.drive([&] { return pair.right.lane->is_closed(); });
    CHECK_EQUAL(pair.right.sink.count, size_t{3});
    CHECK(pair.right.sink.error.code == ErrorCode::auth);
    pair.left.drive([&] { return pair.left.lane->is_closed(); });
    CHECK_EQUAL(pair.left.sink.closes, 1);
  }
}

TEST(closing_settles_what_is_queued) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const auto data = pattern(64 << 10, 0);
    size_t unsent = 0;
    for (int i = 0; i < 200; ++i)
      pair.left.lane->send(header(FrameKind::push, 0, data.size()), data.data(), &unsent);
    CHECK(unsent > 0);
    pair.right.lane.reset();
    pair.left.drive([&] { return pair.left.lane->is_closed(); });
    CHECK_EQUAL(unsent, size_t{0});
    pair.left.lane->send(header(FrameKind::push, 0, data.size()), data.data(), &unsent);
    CHECK_EQUAL(unsent, size_t{0});
  }
}

TEST(what_was_sent_before_the_end_arrives) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const auto data = pattern(5000, 2);
    for (int i = 0; i < 10; ++i)
      pair.left.lane->send(header(FrameKind::push, 2, data.size()), data.data());
    CHECK(pair.left.lane->idle());
    pair.left.lane.reset();
    pair.right.drive([&] { return pair.right.lane->is_closed(); });
    CHECK_EQUAL(pair.right.sink.count, size_t{10});
    CHECK_EQUAL(pair.right.sink.closes, 1);
    CHECK(pair.right.sink.error.code == ErrorCode::peer_lost);
  }
}

TEST(a_killed_process_is_an_end) {
  for (const Transport& transport : kTransports) {
    Pair pair(transport);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      const auto data = pattern(5000, 2);
      for (int i = 0; i < 10; ++i)
        pair.left.lane->send(header(FrameKind::push, 2, data.size()), data.data());
      raise(SIGKILL);
    }
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(dup2(nothing, pair.left.lane->fd()) >= 0);  // only the child holds the left end now
    close(nothing);
    pair.right.drive([&] { return pair.right.lane->is_closed(); });
    CHECK_EQUAL(pair.right.sink.count, size_t{10});
    CHECK(pair.right.sink.error.code == ErrorCode::peer_lost);
    CHECK(waitpid(child, nullptr, 0) == child);
  }
}
int main(int argc, char** argv) { return test::run(argc, argv); }
