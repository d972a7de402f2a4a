// What is particular to lanes over shared memory: rings, sleeping and waking, and another end that
// writes nonsense into them.
#include <fcntl.h>
#include <sys/mman.h>

#include <random>
#include <thread>

#include "lane_pair.h"
#include "shm_ring.h"

using namespace test;

namespace {

constexpr size_t kRing = 4096;

// A lane and a hostile view of its rings. Ring 0 is written by the other end (the first side).
struct Hostile {
  End end;
  std::unique_ptr<RingMemory> memory;
  int socket;
  Hostile() {
    const auto sockets = unix_sockets();
    socket = sockets[0];
    const int fd = make_ring_memory(kRing);
    memory = std::make_unique<RingMemory>(dup(fd));
    end.attach(make_shm_lane(sockets[1], fd, -1, false, 1 << 10));
  }
  ~Hostile() { close(socket); }
  void expect_closed(const char* text) {
    end.drive([&] { return end.lane->is_closed(); });
    CHECK_EQUAL(end.sink.closes, 1);
    CHECK(end.sink.error.code == ErrorCode::protocol);
    CHECK_CONTAINS(end.sink.error.what(), text);
  }
};

void put_header(const Ring& ring, uint64_t at, const Header& head) {
  std::memcpy(ring.data + at % ring.capacity, &head, sizeof head);
}

}  // namespace

TEST(ring_memory_is_sealed_and_sized) {
  const int fd = make_ring_memory(5000);
  CHECK(ftruncate(fd, 4096) != 0 && ftruncate(fd, 1 << 20) != 0);
  const RingMemory memory(fd);
  CHECK_EQUAL(memory.capacity(), size_t{8192});
  const Ring ring = memory.ring(1);
  ring.data[10] = std::byte{42};
  CHECK(ring.data[10 + ring.capacity] == std::byte{42});  // mapped twice
  CHECK(memory.ring(0).data[10] == std::byte{0});
}

TEST(another_file_is_refused) {
  const int open_file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(ftruncate(open_file, 4096 + 2 * 4096) == 0);
  CHECK(THROWN(Error, RingMemory{dup(open_file)}).code == ErrorCode::protocol);
  CHECK(fcntl(open_file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  const RingMemory good(dup(open_file));
  close(open_file);

  const int odd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(ftruncate(odd, 4096 + 2 * 5000) == 0);
  CHECK(fcntl(odd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK(THROWN(Error, RingMemory{odd}).code == ErrorCode::protocol);

  const auto sockets = unix_sockets();
  const Error small =
      THROWN(Error, make_shm_lane(sockets[0], make_ring_memory(kRing), -1, true, 2048));
  CHECK_CONTAINS(small.what(), "rings of at least");
  close(sockets[1]);
}

TEST(a_hostile_head_closes_the_lane) {
  for (const uint64_t head : {uint64_t{kRing + 64}, uint64_t{1}, ~uint64_t{0}, uint64_t{1} << 63}) {
    Hostile hostile;
    hostile.memory->ring(0).control->head = head;
    hostile.expect_closed("position inside the ring");
  }
}

TEST(a_hostile_tail_closes_the_lane) {
  for (const uint64_t tail : {uint64_t{64} * 1000, ~uint64_t{0}}) {
    Hostile hostile;
    hostile.memory->ring(1).control->tail = tail;
    const auto data = pattern(1 << 10, 0);
    for (int i = 0; i < 20; ++i)
      hostile.end.lane->send(header(FrameKind::result, 0, 1 << 10), data.data());
    hostile.expect_closed("position inside the ring");
  }
}

TEST(a_hostile_header_closes_the_lane) {
  {
    Hostile hostile;
    put_header(hostile.memory->ring(0), 0, header(FrameKind::push, 0, 1 << 30));
    hostile.memory->ring(0).control->head = 64;
    hostile.expect_closed("a frame of 1073741824");
  }
  {
    Hostile hostile;
    put_header(hostile.memory->ring(0), 0, header(static_cast<FrameKind>(99), 0, 0));
    hostile.memory->ring(0).control->head = 64;
    hostile.expect_closed("unknown kind 99");
  }
  {
    Hostile hostile;
    put_header(hostile.memory->ring(0), 0, header(FrameKind::push, 0, 1000));
    hostile.memory->ring(0).control->head = 64;
    hostile.expect_closed("a whole frame");
  }
}

TEST(random_bytes_in_the_shared_memory_do_no_harm) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    Hostile hostile;
    const auto data = pattern(1 << 10, 0);
    for (int i = 0; i < 30; ++i) {
      const Ring ring = hostile.memory->ring(static_cast<int>(random() % 2));
      const uint64_t value = random() % 3 ? random() % (2 * kRing) / 64 * 64 : random();
      std::atomic<uint64_t>* words[] = {&ring.control->head, &ring.control->tail,
                                        &ring.control->wanted_head, &ring.control->wanted_tail};
      *words[random() % 4] = value;
      put_header(ring, random() % kRing / 64 * 64, header(FrameKind::push, 0, random() % 1100));
      hostile.end.lane->send(header(FrameKind::result, 0, random() % 1024), data.data());
      hostile.end.step();
      hostile.end.lane->arm(random() % 5000);
      hostile.end.lane->disarm();
    }
  }
}

TEST(bytes_on_the_socket_only_wake) {
  Hostile hostile;
  const std::vector<char> noise(1000, 'x');
  CHECK(write(hostile.socket, noise.data(), noise.size()) == 1000);
  for (int i = 0; i < 50; ++i) hostile.end.step();
  CHECK(!hostile.end.lane->is_closed());
  CHECK(!hostile.end.poller.wait(0, hostile.end.ready) && hostile.end.ready.empty());
}

TEST(no_bell_while_the_consumer_is_awake) {
  Pair pair({"shm"});
  for (int i = 0; i < 100; ++i) {
    pair.left.lane->send(header(FrameKind::push, 0, 0), nullptr);
    pair.right.step();
  }
  CHECK_EQUAL(pair.left.lane->counters.wakeups, uint64_t{0});
  CHECK_EQUAL(pair.right.lane->counters.wakeups, uint64_t{0});
}

TEST(a_watermark_delays_the_bell) {
  Pair pair({"shm"}, 1 << 10, 64 << 10);
  const auto data = pattern(1 << 10, 0);
  CHECK(!pair.right.lane->arm(10000));
  for (int i = 0; i < 9; ++i)
    pair.left.lane->send(header(FrameKind::push, 0, 1 << 10), data.data());
  CHECK_EQUAL(pair.left.lane->counters.wakeups, uint64_t{0});
  pair.left.lane->send(header(FrameKind::push, 0, 1 << 10), data.data());
  CHECK_EQUAL(pair.left.lane->counters.wakeups, uint64_t{1});
  pair.left.lane->send(header(FrameKind::push, 0, 1 << 10), data.data());
  CHECK_EQUAL(pair.left.lane->counters.wakeups, uint64_t{1});
  CHECK(pair.right.lane->arm(10000));  // they are there already
}

TEST(a_watermark_above_the_ring_is_lowered) {
  Pair pair({"shm"}, 1 << 10, 4 << 10);
  const auto data = pattern(1 << 10, 0);
  CHECK(!pair.right.lane->arm(1 << 30));
  for (int i = 0; i < 20; ++i)
    pair.left.lane->send(header(FrameKind::push, 0, 1 << 10), data.data());
  CHECK(!pair.left.lane->idle());
  CHECK_EQUAL(pair.left.lane->counters.wakeups, uint64_t{1});
}

// Both ends sleep whenever they can, with random watermarks, delays and sizes, in rings so small
// that producers wait for room most of the time. A lost wake-up is a sleep that times out.
TEST(no_wake_up_is_lost) {
  for (const bool bells : {true, false}) {
    Pair pair({"shm", bells}, 1 << 10, 4 << 10);
    constexpr uint32_t kFrames = 20000;
    const auto run = [&](End& end, unsigned seed) {
      std::mt19937 random(seed);
      end.sink.keep = false;
      uint32_t sent = 0;
      size_t unsent = 0;
      std::vector<std::byte> data = pattern(1 << 10, 0);
      while (sent < kFrames || end.sink.count < kFrames || !end.lane->idle()) {
        if (end.lane->idle() && sent < kFrames) {
          const size_t burst = std::min<size_t>(1 + random() % 8, kFrames - sent);
          for (size_t i = 0; i < burst; ++i)
            end.lane->send(header(FrameKind::data, sent++, random() % 1025), data.data(), &unsent);
        }
        const bool blocked = !end.lane->idle();
        const size_t before = end.sink.count;
        if (!blocked && (sent < kFrames || before == kFrames)) continue;
        // A mark above one frame only when so much is sure to come.
        const size_t mark = blocked || kFrames - before < 5 ? 1 : 1 + random() % 200;
        end.drive([&] { return end.sink.count > before || (blocked && end.lane->idle()); }, mark,
                  5000);
        if (random() % 64 == 0) usleep(random() % 50);
      }
    };
    std::thread other([&] { run(pair.right, 2); });
    run(pair.left, 1);
    other.join();
    CHECK_EQUAL(pair.left.sink.count, size_t{kFrames});
    CHECK_EQUAL(pair.right.sink.count, size_t{kFrames});
    CHECK(pair.left.lane->counters.wakeups > 0);
  }
}

// The same mapping used from two threads, so that a thread sanitizer sees all accesses.
TEST(a_ring_publishes_what_it_carries) {
  const RingMemory memory(make_ring_memory(kRing));
  constexpr uint32_t kFrames = 50000;
  std::thread producer([&] {
    RingProducer out(memory.ring(0));
    std::vector<uint32_t> words(256);
    for (uint32_t i = 0; i < kFrames;) {
      bool wake = false;
      for (uint32_t& word : words) word = i;
      if (out.push(header(FrameKind::data, i, 4 * (i % 256)), words.data(), wake))
        ++i;
      else
        std::this_thread::yield();
    }
  });
  RingConsumer in(memory.ring(0));
  Header head;
  for (uint32_t i = 0; i < kFrames;) {
    const std::byte* payload = in.pop(head, 1 << 10);
    if (!payload) {
      std::this_thread::yield();
      continue;
    }
    CHECK_EQUAL(head.id, i);
    for (uint32_t w = 0; w < i % 256; ++w)
      CHECK(reinterpret_cast<const uint32_t*>(payload)[w] == i);
    if (i++ % 3 == 0) in.release();
    if (in.unreleased() > kRing / 2) in.release();
  }
  producer.join();
}

int main(int argc, char** argv) { return test::run(argc, argv); }
