// The poller: bells from any thread, lanes by their descriptors.
#include <sys/epoll.h>

#include <thread>

#include "lane_pair.h"

using namespace test;

TEST(a_bell_rung_before_is_not_lost) {
  Poller poller;
  std::vector<Lane*> ready;
  CHECK(!poller.wait(0, ready));
  poller.ring();
  poller.ring();
  CHECK(poller.wait(1000, ready));
  CHECK(ready.empty());
  CHECK(!poller.wait(0, ready));  // both rings were taken by one wait
}

TEST(a_bell_from_another_thread_wakes) {
  Poller poller;
  std::vector<Lane*> ready;
  for (int i = 0; i < 100; ++i) {
    std::thread other([&] { poller.ring(); });
    CHECK(poller.wait(10000, ready));
    other.join();
  }
}

TEST(lanes_are_reported_and_marked) {
  Pair pair({"tcp"});
  End& right = pair.right;
  right.step();
  CHECK(!right.lane->fd_ready);
  pair.left.lane->send(header(FrameKind::push, 0, 0), nullptr);
  CHECK(!right.poller.wait(10000, right.ready));
  CHECK(right.ready.size() == 1 && right.ready[0] == right.lane.get());
  CHECK(right.lane->fd_ready);
}

TEST(write_is_watched_on_demand) {
  Pair pair({"tcp"});
  End& left = pair.left;
  left.step();
  CHECK(!left.poller.wait(0, left.ready) && left.ready.empty());
  left.poller.watch_write(*left.lane, true);
  left.poller.wait(10000, left.ready);
  CHECK(left.ready.size() == 1);
  left.poller.watch_write(*left.lane, false);
  left.poller.wait(0, left.ready);
  CHECK(left.ready.empty());
}

TEST(a_removed_lane_is_silent) {
  Pair pair({"tcp"});
  End& right = pair.right;
  right.poller.remove(*right.lane);
  pair.left.lane->send(header(FrameKind::push, 0, 0), nullptr);
  right.poller.wait(20, right.ready);
  CHECK(right.ready.empty());
}

TEST(the_poller_itself_can_be_polled) {
  Poller inner, outer;
  epoll_event event{};
  event.events = EPOLLIN;
  CHECK(epoll_ctl(outer.epoll(), EPOLL_CTL_ADD, inner.epoll(), &event) == 0);
  std::vector<Lane*> ready;
  inner.ring();
  epoll_event got;
  CHECK(epoll_wait(outer.epoll(), &got, 1, 10000) == 1);
}

int main(int argc, char** argv) { return test::run(argc, argv); }
