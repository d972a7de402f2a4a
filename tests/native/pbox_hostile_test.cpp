// Workers that break the protocol or do not read. What they do ends their own job with an error
// that names them, while another job on the same cores goes on exactly.
#include <sys/socket.h>

#include "pbox_hostile.h"
#include "shm_ring.h"

using namespace test;

namespace {

struct Offence {
  const char* text;  // what the error says
  std::function<void(RawRank&, const TableInfo&)> commit;
  bool arena = false, server = false;
  Compression compression = {};
};

// The table has chunks 0 (core 0, 4096 bytes), 1 (core 1, 4096 bytes) and 2 (core 0, 40 bytes).
const std::vector<KeySpec> kKeys = {{2048}, {10}};

std::vector<Offence> offences() {
  using K = FrameKind;
  const auto id = [](const TableInfo& t, uint32_t chunk) { return t.first_chunk + chunk; };
  std::vector<Offence> all = {
      {"unknown chunk", [](auto& r, auto&) { r.send(0, frame(K::push, 1u << 31, 8)); }},
      {"unknown chunk", [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 3), 8)); }},
      {"3 bytes", [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 0), 3)); }},
      {"0 bytes", [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 0), 0)); }},
      {"expected 0",
       [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 2), 40, flag::no_grad)); }},
      {"another chunk's core",
       [=](auto& r, auto& t) { r.send(1, frame(K::push, id(t, 0), 4096)); }},
      {"in place", [](auto& r, auto& t) { r.send(0, frame(K::push_key, t.first_key, 0)); }},
      {"no weights", [=](auto& r, auto& t) { r.send(0, frame(K::pull, id(t, 0), 0)); }},
      {"unknown chunk", [](auto& r, auto&) { r.send(1, frame(K::pull, 5, 0)); }},
      {"of no key", [](auto& r, auto&) { r.send(0, frame(K::hyper, 0, sizeof(HyperWire))); }},
      {"kind 17", [](auto& r, auto&) { r.send(0, frame(K::posted, 0, 0)); }},
      {"kind 18", [](auto& r, auto&) { r.send(0, frame(K::data, 0, 100)); }},
      {"kind 8", [](auto& r, auto&) { r.send(0, frame(K::result, 0, 0)); }},
      {"kind 5", [](auto& r, auto&) { r.send(0, frame(K::commit, 0, 0)); }},
      {"unknown kind 99", [](auto& r, auto&) { r.send(0, frame(static_cast<K>(99), 0, 0)); }},
      {"error frame", [](auto& r, auto&) { r.send(0, frame(K::error, 0, 7)); }},
  };
  all.push_back({"step 7", [=](auto& r, auto& t) {
                   Header head = frame(K::push, id(t, 0), 4096);
                   head.step = 7;
                   r.send(0, head);
                 }});
  all.push_back({"as rank 0", [=](auto& r, auto& t) {
                   Header head = frame(K::push, id(t, 0), 4096);
                   head.sender = 0;
                   r.send(0, head);
                 }});
  // An honest rank 0 has pushed chunk 2 as a gradient, but a job of 3 waits for rank 2.
  all.push_back({"twice", [=](auto& r, auto& t) {
                   r.send(0, frame(K::push, id(t, 2), 40));
                   r.send(0, frame(K::push, id(t, 2), 40));
                 }});
  all.push_back({"as initial weights, other ranks did not",
                 [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 2), 40, flag::init)); }});
  all.push_back({"read in place",
                 [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, 0), 4096)); }, true});
  all.push_back({"unknown key", [](auto& r, auto&) { r.send(0, frame(K::push_key, 3, 0)); }, true});
  all.push_back(
      {"in place", [](auto& r, auto& t) { r.send(0, frame(K::push_key, t.first_key, 5)); }, true});
  all.push_back({"in place",
                 [](auto& r, auto& t) { r.send(1, frame(K::push_key, t.first_key + 1, 0)); },
                 true});
  all.push_back({"of no key",
                 [](auto& r, auto&) { r.send(0, frame(K::hyper, 1, sizeof(HyperWire))); }, false,
                 true});
  const Compression two_bit{Packing::two_bit, 0.5}, top_k{Packing::top_k, 0.25};
  const auto packed = [&](const char* text, const Compression& compression, uint32_t chunk,
                          size_t length, const void* payload = nullptr, uint8_t flags = 0) {
    all.push_back(
        {text,
         [=](auto& r, auto& t) { r.send(0, frame(K::push, id(t, chunk), length, flags), payload); },
         false, false, compression});
  };
  packed("4096 bytes, expected 256", two_bit, 0, 4096);
  packed("260 bytes, expected 256", two_bit, 0, 260);
  packed("256 bytes, expected 4096", two_bit, 0, 256, nullptr, flag::init);
  packed("128 bytes, expected 132", {Packing::one_bit}, 0, 128);
  packed("0 bytes, expected 2048", {Packing::f16}, 0, 0);
  packed("24 bytes, expected 16", top_k, 2, 24);
  // Chunk 2 has 10 elements, of which 2 are sent: their indices, then their values.
  static constexpr uint32_t kBehind[] = {0, 10, 0, 0}, kFar[] = {1, UINT32_MAX, 0, 0},
                            kTwice[] = {3, 3, 0, 0}, kBack[] = {5, 4, 0, 0};
  for (const uint32_t* form : {kBehind, kFar, kTwice, kBack})
    packed("elements that it does not have", top_k, 2, sizeof kBehind, form);
  all.push_back(
      {"39 bytes", [](auto& r, auto&) { r.send(0, frame(K::hyper, 0, 39)); }, false, true});
  const auto hyper = [](RawRank& r, uint32_t rule, uint32_t options) {
    const HyperWire values{rule, options, 0.1, 0, 0.9, 0, 0.9, 0.99, 1e-8};
    r.send(0, frame(K::hyper, 0, sizeof values), &values);
  };
  all.push_back({"unknown rule, 7", [=](auto& r, auto&) { hyper(r, 7, 0); }, false, true});
  all.push_back({"2 arrays of state are needed; the keys were registered with 1",
                 [=](auto& r, auto&) { hyper(r, HyperWire::adam, 0); }, false, true});
  const auto state = [=](int array, int part, uint32_t length) {
    return [=](RawRank& r, const TableInfo& t) {
      const StatePart which(static_cast<uint8_t>(array), static_cast<uint8_t>(part));
      r.send(0, frame(K::state, id(t, 0), length, which.flags()));
    };
  };
  all.push_back({"array 0 part 0 with 0 bytes", state(0, 0, 0)});  // it has no optimizer
  all.push_back({"array 2 part 0 with 0 bytes", state(2, 0, 0), false, true});
  all.push_back({"array 1 part 1 with 4096 bytes", state(1, 1, 4096), false, true});
  all.push_back({"array 1 part 0 with 40 bytes", state(1, 0, 40), false, true});
  all.push_back({"state of unknown chunk",
                 [=](auto& r, auto& t) { r.send(0, frame(K::state, id(t, 3), 0)); }, false, true});
  return all;
}

}  // namespace

TEST(every_offence_ends_its_own_job_and_names_the_rank) {
  Box box(kCores);
  Bystander bystander(box);
  uint32_t job = 0;
  for (const Transport& transport : kBoth) {
    for (const Offence& offence : offences()) {
      bystander.begin();
      box.server.add_job(++job, 3);
      Worker honest(0);
      for (int core = 0; core < kCores; ++core)
        honest.client.attach(core, box.lane(job, 0, core, transport));
      RawRank hostile(box, job, 1, transport);
      TableInfo info = table_of(kKeys, kCores);
      info.arena = offence.arena;
      info.server = offence.server;
      info.states = offence.server ? 1 : 0;
      info.compression = offence.compression;
      box.server.add_table(job, info, 3);
      honest.client.add(info, {});
      Floats memory(info.bytes / sizeof(float));
      push_all(honest, info, 0, memory);
      while (box.server.stalled(job).size() < 2) std::this_thread::yield();  // its pushes are there
      offence.commit(hostile, info);
      const JobEvent event = box.event(job);
      CHECK_EQUAL(event.rank, 1);
      box.server.fail_job(job, Error(event.code, event.text, event.rank));
      const Error error = failure(honest, info.id);
      CHECK(error.code == ErrorCode::protocol);
      CHECK_CONTAINS(error.what(), "rank 1");
      CHECK_CONTAINS(error.what(), offence.text);
      bystander.finish();
      box.server.drop_job(job);
    }
  }
}

TEST(a_frame_that_is_too_long_is_refused) {
  Box box(1);
  for (const Transport& transport : kBoth) {
    box.server.add_job(1, 1);
    const auto lane = box.lane(1, 0, 0, transport, 1024);
    if (std::string(transport.name) == "shm") {
      // The ring holds less than the length that the header claims.
      const std::vector<std::byte> noise(1500);
      lane->send(frame(FrameKind::push, 0, 1500), noise.data());
    } else {
      const std::vector<std::byte> noise(1 << 20);
      lane->send(frame(FrameKind::push, 0, 1 << 20), noise.data());
    }
    const JobEvent event = box.event(1);
    CHECK(event.code == ErrorCode::protocol);
    CHECK_CONTAINS(event.text, "rank 0 broke its lane");
    box.server.drop_job(1);
  }
}

TEST(positions_that_a_worker_scribbles_over_end_its_job) {
  Box box(1);
  box.server.add_job(1, 1);
  const auto sockets = unix_sockets();
  const int memory = make_ring_memory(4 * kPayload);
  RingMemory scribbled(dup(memory));
  box.server.attach(1, 0, 0, make_shm_lane(sockets[0], memory, -1, true, kPayload));
  scribbled.ring(1).control->head = 1u << 30;
  CHECK(write(sockets[1], "x", 1) == 1);
  const JobEvent event = box.event(1);
  CHECK(event.code == ErrorCode::protocol);
  CHECK_EQUAL(event.rank, 0);
  CHECK_CONTAINS(event.text, "position inside the ring");
  close(sockets[1]);
}

TEST(a_worker_that_does_not_read_is_refused) {
  Box box(1);
  for (const Transport& transport : kBoth) {
    box.server.add_job(1, 2);
    Worker honest(0);
    honest.client.attach(0, box.lane(1, 0, 0, transport));
    const TableInfo info = table_of({{1024}}, 1);
    box.server.add_table(1, info, 2);
    honest.client.add(info, {});
    // It never calls progress, so nothing is taken out of its lane.
    const auto lane = box.lane(1, 1, 0, transport, kPayload);
    Floats memory(1024);
    Header head = frame(FrameKind::push, info.first_chunk, kPayload);
    const auto step = [&] {
      lane->send_copy(head, memory.data());
      ++head.step;
      push_all(honest, info, 0, memory);
      wait_all(honest, info.id);
    };
    // On tcp the kernel's buffers take some answers first.
    const Error error = THROWN(Error, for (int i = 0; i < 50000; ++i) step());
    CHECK(error.code == ErrorCode::protocol);
    CHECK_EQUAL(error.rank, 1);
    CHECK_CONTAINS(error.what(), "does not read its answers");
    box.server.drop_job(1);
  }
}

TEST(pulls_without_reading_are_refused) {
  Box box(1);
  box.server.add_job(1, 1);
  TableInfo info = table_of({{1024}}, 1);
  info.server = true;
  box.server.add_table(1, info, 1);
  const auto lane = box.lane(1, 0, 0, {"shm", false}, kPayload);
  Recorder unread;
  Header head = frame(FrameKind::pull, info.first_chunk, 0);
  head.sender = 0;
  for (int i = 0; i < 1000; ++i) lane->send(head, nullptr);
  JobEvent event{};
  while (!box.server.next_event(event, 0.001)) lane->progress(unread, 0);  // sends only
  CHECK_CONTAINS(event.text, "does not read its answers");
}

TEST(a_second_lane_to_the_same_core_is_refused) {
  Box box(1);
  box.server.add_job(1, 2);
  const auto first = box.lane(1, 0, 0, {"tcp"});
  const Error error = THROWN(Error, box.lane(1, 0, 0, {"tcp"}));
  CHECK_CONTAINS(error.what(), "already");
}

int main(int argc, char** argv) { return test::run(argc, argv); }
