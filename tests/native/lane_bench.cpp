// What a lane carries between two processes: GB/s of payload one way, and the round trip of an
// empty frame when both ends sleep in between.
#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdio>

#include "lane_pair.h"

using namespace test;

namespace {

constexpr double kGigabytes = 4;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Processor seconds of this process and its children so far.
double cpu_seconds() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime})
      sum += static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  }
  return sum;
}

// Runs `child` in a forked process with the left end, `parent` here with the right end.
template <class Child, class Parent>
double apart(Pair& pair, Child child, Parent parent) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    child(pair.left);
    std::_Exit(0);
  }
  const auto start = std::chrono::steady_clock::now();
  parent(pair.right);
  const double took = seconds_since(start);
  CHECK(waitpid(pid, nullptr, 0) == pid);
  return took;
}

double stream(const Transport& transport, size_t payload, bool place) {
  const size_t frames = static_cast<size_t>(kGigabytes * 1e9) / payload;
  Pair pair(transport, std::max<size_t>(payload, 32 << 10), 1 << 20);
  pair.right.sink.keep = false;
  std::vector<std::byte> target(payload);
  if (place) pair.right.sink.place = [](const Header&) { return true; };
  const double took = apart(
      pair,
      [&](End& left) {
        std::vector<std::byte> data(16 << 20);
        size_t unsent = 0;
        for (size_t i = 0; i < frames; ++i) {
          left.lane->send(header(FrameKind::data, 0, payload),
                          data.data() + i * payload % (data.size() - payload), &unsent);
          if (unsent > 64) left.drive([&] { return unsent < 32; });
        }
        left.drive([&] { return left.lane->idle(); });
        left.drive([&] { return left.sink.count == 1; });
      },
      [&](End& right) {
        const size_t batch = (128 << 10) / payload + 1;
        right.drive([&] { return right.sink.count + 2 * batch > frames; }, 128 << 10);
        right.drive([&] { return right.sink.count == frames; });
        right.lane->send(header(FrameKind::bye, 0, 0), nullptr);
      });
  return kGigabytes / took;
}

double round_trip(const Transport& transport, uint32_t rounds) {
  Pair pair(transport);
  pair.left.sink.keep = pair.right.sink.keep = false;
  const double took = apart(
      pair,
      [&](End& left) {
        for (uint32_t i = 0; i < rounds; ++i) {
          left.drive([&] { return left.sink.count == i + 1; });
          left.lane->send(header(FrameKind::data, i, 0), nullptr);
        }
        left.drive([&] { return left.lane->is_closed(); });
      },
      [&](End& right) {
        for (uint32_t i = 0; i < rounds; ++i) {
          right.lane->send(header(FrameKind::data, i, 0), nullptr);
          right.drive([&] { return right.sink.count == i + 1; });
        }
        right.lane->close(Error(ErrorCode::peer_lost, "done"), right.sink);
      });
  return took / rounds * 1e6;
}

}  // namespace

int main() {
  std::printf("# one way between two processes; 'placed': written to a destination, else shown\n");
  std::printf("# %-8s %12s %8s %8s %14s\n", "lane", "payload", "placed", "GB/s", "cpu s/GB");
  for (const Transport& transport : kTransports) {
    for (const size_t payload :
         {size_t{4} << 10, size_t{32} << 10, size_t{128} << 10, size_t{256} << 10})
      for (const bool place : {false, true}) {
        const double before = cpu_seconds();
        const double rate = stream(transport, payload, place);
        std::printf("  %-8s %12zu %8s %8.2f %14.3f\n", transport.name, payload,
                    place ? "yes" : "no", rate, (cpu_seconds() - before) / kGigabytes);
        std::fflush(stdout);
      }
    std::printf("  %-8s round trip, both sleep: %.1f us\n", transport.name,
                round_trip(transport, 20000));
  }
  return 0;
}
