// How a job, a table or a worker's part in them ends, in good order and otherwise.
#include <sys/socket.h>

#include "pbox_hostile.h"

using namespace test;

namespace {

const std::vector<KeySpec> kKeys = {{3000}, {10}};

struct Job {
  Box box{kCores};
  std::vector<std::unique_ptr<Worker>> ranks;
  TableInfo info = table_of(kKeys, kCores);
  std::vector<Floats> memories;

  Job(int size, const Transport& transport, bool arena = false) {
    ranks = box.job(1, size, transport);
    info.arena = arena;
    box.table(1, ranks, info);
    memories.assign(ranks.size(), Floats(info.bytes / sizeof(float), 1));
  }
  void push(size_t rank) { push_all(*ranks[rank], info, 0, memories[rank]); }
  void step() {
    for (size_t rank = 0; rank < ranks.size(); ++rank) push(rank);
    for (auto& rank : ranks) wait_all(*rank, info.id);
  }
};

}  // namespace

TEST(a_lost_worker_is_named_to_the_others) {
  for (const Transport& transport : kBoth) {
    Job job(3, transport);
    job.step();
    job.push(0);
    job.ranks[1].reset();  // its sockets close, without a farewell
    const JobEvent event = job.box.event(1);
    CHECK_EQUAL(event.rank, 1);
    job.box.server.fail_job(1, Error(event.code, event.text, event.rank));
    for (const size_t rank : {size_t{0}, size_t{2}}) {
      const Error error =
          rank == 0 ? failure(*job.ranks[0], 1) : THROWN(Error, while (true) job.push(2));
      CHECK(error.code == ErrorCode::peer_lost || error.code == ErrorCode::duplicate);
      if (rank == 0) CHECK_CONTAINS(error.what(), "rank 1 was lost");
      if (rank == 0) CHECK_EQUAL(error.rank, 1);
    }
  }
}

TEST(an_error_wakes_who_sleeps_until_a_large_answer_has_come) {
  for (const Transport& transport : kBoth) {
    Box box(1);
    auto ranks = box.job(1, 2, transport);
    const TableInfo info = table_of({{1 << 20}}, 1, 64 << 10);
    box.table(1, ranks, info);
    Floats memory(1 << 20);
    push_all(*ranks[0], info, 0, memory);
    std::thread end([&] {
      // All chunks are there, so the worker has nothing to do but to wait.
      while (box.server.stalled(1).empty()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it falls asleep
      box.server.fail_job(1, Error(ErrorCode::peer_lost, "rank 1 was lost", 1));
    });
    const auto start = std::chrono::steady_clock::now();
    const Error error = failure(*ranks[0], info.id);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    CHECK_EQUAL(error.rank, 1);
    end.join();
  }
}

TEST(a_lost_server_is_told_to_the_workers) {
  for (const Transport& transport : kBoth) {
    std::vector<std::unique_ptr<Worker>> ranks;
    Floats memory(1000);
    const TableInfo info = table_of({{100}}, kCores);
    auto box = std::make_unique<Box>(kCores);
    ranks = box->job(1, 2, transport);
    box->table(1, ranks, info);
    push_all(*ranks[0], info, 0, memory);
    std::thread end([&] { box.reset(); });
    const Error error = failure(*ranks[0], info.id);
    end.join();
    CHECK(error.code == ErrorCode::peer_lost);
    CHECK_EQUAL(error.rank, -1);
    CHECK_CONTAINS(error.what(), "server was lost");
  }
}

TEST(who_leaves_while_others_go_on_is_named) {
  for (const Transport& transport : kBoth)
    for (const bool waiting : {true, false}) {
      Job job(2, transport);
      job.step();
      if (waiting) {
        job.push(0);
        while (job.box.server.stalled(1).empty()) std::this_thread::yield();
      }
      job.ranks[1]->client.close();
      if (!waiting) job.push(0);
      const Error error = failure(*job.ranks[0], 1);
      CHECK(error.code == ErrorCode::peer_lost);
      CHECK_EQUAL(error.rank, 1);
      CHECK_CONTAINS(error.what(), waiting ? "rank 1 has ended" : "rank 1");
    }
}

TEST(an_answer_that_came_before_the_error_is_good) {
  for (const Transport& transport : kBoth) {
    Job job(2, transport);
    job.push(0);
    job.push(1);
    wait_all(*job.ranks[1], 1);  // so the answer is on its way to rank 0, too
    job.ranks[1].reset();
    job.box.event(1);
    wait_all(*job.ranks[0], 1);
    CHECK_EQUAL(job.memories[0][0], 2.0f);
    const Error error = THROWN(Error, job.push(0), wait_all(*job.ranks[0], 1));
    CHECK(error.code == ErrorCode::peer_lost);
  }
}

TEST(all_may_leave_one_after_the_other) {
  for (const Transport& transport : kBoth) {
    Job job(3, transport);
    job.step();
    for (auto& rank : job.ranks) rank->client.close();
    JobEvent event;
    CHECK(!job.box.server.next_event(event, 0.05));
    CHECK_CONTAINS(THROWN(Error, job.push(0)).what(), "has left the job");
  }
}

TEST(a_worker_that_ends_with_an_error_passes_it_on) {
  Job job(2, {"shm", false});
  job.push(0);
  job.ranks[1]->client.fail(Error(ErrorCode::peer_lost, "rank 9 is gone", 9));
  job.ranks[1]->client.close();
  const Error error = failure(*job.ranks[0], 1);
  CHECK_EQUAL(error.rank, 9);
  CHECK_CONTAINS(error.what(), "rank 9 is gone");
}

TEST(a_worker_that_has_lost_the_server_is_itself_the_lost_one) {
  Job job(2, {"tcp"});
  job.push(0);
  job.ranks[1]->client.fail(Error(ErrorCode::peer_lost, "the server is gone"));
  job.ranks[1]->client.close();
  CHECK_EQUAL(failure(*job.ranks[0], 1).rank, 1);
}

TEST(close_wakes_a_waiter) {
  Job job(2, {"tcp"});
  job.push(0);
  std::thread waiter([&] { failure(*job.ranks[0], 1); });
  while (job.box.server.stalled(1).empty()) std::this_thread::yield();
  job.ranks[0]->client.close();
  waiter.join();
}

TEST(close_in_mid_push_uses_no_memory_afterwards) {
  for (const Transport& transport : kBoth) {
    Box box(1);
    box.server.add_job(1, 2);
    Worker worker(0);
    // The other end of this lane is not a core: nobody reads it, so the push stays queued.
    int other = -1;
    if (std::string(transport.name) == "tcp") {
      const auto sockets = tcp_sockets();
      other = sockets[0];
      worker.client.attach(0, make_tcp_lane(sockets[1], {}, 1 << 20));
    } else {
      const auto sockets = unix_sockets();
      other = sockets[0];
      worker.client.attach(0,
                           make_shm_lane(sockets[1], make_ring_memory(1 << 12), -1, false, 1024));
    }
    const TableInfo info = table_of({{16 << 20}}, 1, 1 << 10);
    worker.client.add(info, {});
    {
      const auto memory = Memory::anonymous(info.bytes);  // unmapped at the end: a read would crash
      worker.client.push(info.id, 0, 0, memory->data());
      worker.client.drop(info.id);
      worker.client.close();
    }
    std::vector<char> sink(1 << 16);
    while (read(other, sink.data(), sink.size()) > 0) {
    }
    close(other);
  }
}

TEST(a_table_dropped_with_answers_under_way_still_sends_them) {
  Box box(1);
  box.server.add_job(1, 1);
  const TableInfo info = table_of({{40 * 1024}}, 1);
  box.server.add_table(1, info, 1);
  End end;  // a ring of two chunks: most answers wait in the server
  end.attach(box.lane(1, 0, 0, {"shm", false}, kPayload));
  for (uint32_t chunk = 0; chunk < info.chunks.size(); ++chunk) {
    const std::vector<float> data(1024, static_cast<float>(chunk));
    Header head = frame(FrameKind::push, info.first_chunk + chunk, kPayload);
    head.sender = 0;
    end.lane->send_copy(head, data.data());
  }
  Recorder unread;  // pushing goes on without a look at the answers, until all are in
  while (box.server.chunks_answered(1) < info.chunks.size()) end.lane->progress(unread, 0);
  box.server.drop_table(1, info.id);
  end.drive([&] { return end.sink.count == info.chunks.size(); });
  for (const Received& got : end.sink.frames) {
    float value;
    std::memcpy(&value, got.payload.data(), sizeof value);
    CHECK_EQUAL(value, static_cast<float>(got.header.id - info.first_chunk));
  }
}

TEST(a_table_dropped_in_mid_exchange_does_not_disturb_the_next) {
  for (const Transport& transport : kBoth) {
    Job job(2, transport);
    job.push(0);
    job.ranks[0]->client.drop(job.info.id);
    const TableInfo second = table_of({{200000}}, kCores, 4096, 2);
    job.box.table(1, job.ranks, second);
    std::vector<Floats> memories(2, Floats(second.bytes / sizeof(float), 5));
    for (int step = 0; step < 5; ++step) {
      together(2, [&](int rank) {
        push_all(*job.ranks[static_cast<size_t>(rank)], second, 0,
                 memories[static_cast<size_t>(rank)]);
        wait_all(*job.ranks[static_cast<size_t>(rank)], second.id);
      });
      if (step == 1) {  // now the answers come that nobody wants any more
        job.push(1);
        wait_all(*job.ranks[1], job.info.id);
      }
    }
    CHECK_EQUAL(memories[0][199999], 5.0f * 32);
    CHECK_EQUAL(job.memories[0][0], 1.0f);
  }
}

TEST(a_table_that_one_rank_has_ended_is_an_error_for_the_others) {
  for (const bool waiting : {true, false}) {
    Job job(2, {"shm", false}, false);
    job.step();
    const Error cause(ErrorCode::mismatch, "rank 1 has closed it", 1);
    if (waiting) {
      job.push(0);
      while (job.box.server.stalled(1).size() < 2) std::this_thread::yield();
    }
    job.box.server.end_table(1, job.info.id, cause);
    if (!waiting) job.push(0);
    const Error error = failure(*job.ranks[0], 1);
    CHECK(error.code == ErrorCode::mismatch);
    CHECK_CONTAINS(error.what(), "rank 1 has closed it");
  }
}

TEST(a_worker_that_does_not_read_for_long_is_not_lost) {
  Box box(1);
  box.server.add_job(1, 1);
  const TableInfo info = table_of({{6 << 20}}, 1);  // 24 MiB, more than sockets take in
  box.server.add_table(1, info, 1);
  const TcpOptions impatient{"", 0, 1, 0};
  const auto sockets = tcp_sockets();
  box.server.attach(1, 0, 0, make_tcp_lane(sockets[0], impatient, kPayload));
  End end;
  end.attach(make_tcp_lane(sockets[1], impatient, kPayload));
  end.sink.keep = false;
  const std::vector<float> data(1024, 7);
  Recorder unread;
  for (uint32_t chunk = 0; chunk < info.chunks.size(); ++chunk) {
    Header head = frame(FrameKind::push, info.first_chunk + chunk, kPayload);
    head.sender = 0;
    end.lane->send(head, data.data());
  }
  while (box.server.chunks_answered(1) < info.chunks.size()) end.lane->progress(unread, 0);
  JobEvent event;
  CHECK(!box.server.next_event(event, 3.5));  // stopped, as in a debugger
  end.drive([&] { return end.sink.count == info.chunks.size(); });
}

TEST(stalled_keys_and_missing_ranks_are_told) {
  Job job(3, {"tcp"});
  job.push(0);
  job.push(2);
  std::vector<Stalled> found;
  const auto all_there = [&] {
    found = job.box.server.stalled(1);
    return found.size() == 2 && found[0].missing.size() == 1 && found[1].missing.size() == 1;
  };
  while (!all_there()) std::this_thread::yield();
  CHECK_EQUAL(found[0].missing[0], 1);
  CHECK(found[0].key != found[1].key);
}

int main(int argc, char** argv) { return test::run(argc, argv); }
