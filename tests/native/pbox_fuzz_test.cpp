// Frames that are almost right, from two ranks of one job after another, while another job on the
// same cores is checked to go on exactly. 20,000 frames, or 10^6 with PHUB_TEST_LONG=1.
#include <dirent.h>

#include <cstdlib>
#include <random>

#include "pbox_hostile.h"

using namespace test;

namespace {

const HyperWire kHyper = sgd(0.1, 0.9);
const std::vector<KeySpec> kKeys = {{2500}, {10}, {0}, {1024}};
const Compression kCompressions[] = {
    {}, {}, {Packing::bf16}, {Packing::two_bit, 0.5}, {Packing::one_bit}, {Packing::top_k, 0.1}};

int open_descriptors() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

// One job whose two ranks send frames until one of them is an offence.
class FuzzedJob {
 public:
  FuzzedJob(Box& box, uint32_t id, std::mt19937& random)
      : box_(box), id_(id), random_(random), info_(table_of(kKeys, kCores)) {
    info_.server = random() % 2;
    info_.states = info_.server ? 1 : 0;
    info_.deterministic = random() % 2;
    info_.arena = random() % 3 == 0;
    info_.shared = info_.arena && info_.server && random() % 2;
    if (!info_.arena) info_.compression = kCompressions[random() % std::size(kCompressions)];
    box.server.add_job(id, 2);
    const Transport& transport = kBoth[random() % 2];
    for (uint16_t rank = 0; rank < 2; ++rank) {
      ranks_.push_back(std::make_unique<RawRank>(box, id, rank, transport));
      for (size_t core = 0; core < kCores; ++core) {
        Recorder& sink = ranks_.back()->ends[core]->sink;
        sink.keep = false;
        sink.on_frame = [this, rank, core](Lane&, const Header& head, const std::byte*) {
          answered(rank, core, head);
        };
      }
    }
    box.server.add_table(id, info_, 2);
    for (uint16_t rank = 0; info_.server && rank < 2; ++rank)
      for (int core = 0; core < kCores; ++core)
        ranks_[rank]->send(core, {FrameKind::hyper, 0, rank, 0, 0, sizeof kHyper}, &kHyper);
  }
  ~FuzzedJob() { box_.server.drop_job(id_); }

  // Sends one frame: most are right. Nothing when the unit it would be about is in flight.
  void send() {
    const auto index = static_cast<uint32_t>(random_() % info_.chunks.size());
    const uint16_t sender = random_() % 2;
    int core = info_.chunks[index].core;
    const bool asks = info_.server && random_() % 8 == 0;
    if (in_flight_[sender][unit(index)]) return;
    Header head = asks ? question(sender, index) : push(sender, index);
    std::vector<std::byte> payload(head.length);
    if (info_.compression.packing == Packing::top_k) fill_indices(payload);
    if (head.kind == FrameKind::hyper) std::memcpy(payload.data(), &kHyper, sizeof kHyper);
    if (random_() % 50 == 0) mutate(head, core, payload);
    ranks_[sender]->ends[static_cast<size_t>(core)]->lane->send_copy(head, payload.data());
    ++sent;
  }

  // Takes the answers in; false when the job has ended.
  bool goes_on() {
    for (auto& one : ranks_) {
      one->step();
      for (auto& end : one->ends)
        if (end->lane->is_closed()) return false;
    }
    JobEvent event;
    while (box_.server.next_event(event, 0)) {
      const bool typed = event.code == ErrorCode::protocol || event.code == ErrorCode::mismatch ||
                         event.code == ErrorCode::peer_lost || reported_;
      if (!typed) test::fail(__FILE__, __LINE__, "an untyped end: " + event.text);
      if (event.job == id_) return false;
    }
    return true;
  }

  int sent = 0;

 private:
  // What is exchanged as a whole: a chunk, or a key's chunks on one core.
  size_t unit(uint32_t index) const {
    const ChunkInfo& chunk = info_.chunks[index];
    return info_.arena ? chunk.key * size_t{kCores} + chunk.core : index;
  }
  Header push(uint16_t sender, uint32_t index) {
    const ChunkInfo& chunk = info_.chunks[index];
    const uint32_t step = step_[sender][unit(index)]++;
    in_flight_[sender][unit(index)] = true;
    if (info_.arena) return {FrameKind::push_key, 0, sender, info_.first_key + chunk.key, step, 0};
    const uint8_t flags = random_() % 10 == 0 ? flag::no_grad : 0;
    const auto length = static_cast<uint32_t>(push_bytes(info_, chunk, flags));
    return {FrameKind::push, flags, sender, info_.first_chunk + index, step, length};
  }
  // Those of a form are right when they rise.
  static void fill_indices(std::vector<std::byte>& form) {
    for (uint32_t i = 0; i < form.size() / 8; ++i)
      std::memcpy(form.data() + i * sizeof i, &i, sizeof i);
  }
  // A pull, or hyperparameters again.
  Header question(uint16_t sender, uint32_t index) {
    if (info_.arena || random_() % 2) return {FrameKind::hyper, 0, sender, 0, 0, sizeof kHyper};
    in_flight_[sender][unit(index)] = true;
    return {FrameKind::pull, 0, sender, info_.first_chunk + index, 0, 0};
  }
  void answered(uint16_t rank, size_t core, const Header& head) {
    if (head.kind != FrameKind::result) return;
    const size_t unit =
        info_.arena ? (head.id - info_.first_key) * kCores + core : head.id - info_.first_chunk;
    in_flight_[rank].at(unit) = false;
  }
  void mutate(Header& head, int& core, std::vector<std::byte>& payload) {
    const uint32_t values[] = {0, 1, 2, 0x7fffffff, 0xffffffff, static_cast<uint32_t>(random_())};
    const uint32_t value = values[random_() % 6];
    switch (random_() % 7) {
      case 0:
        head.kind = static_cast<FrameKind>(value % 40);
        break;
      case 1:
        head.flags = static_cast<uint8_t>(value);
        break;
      case 2:
        head.sender = static_cast<uint16_t>(value);
        break;
      case 3:
        head.id = value;
        break;
      case 4:
        head.step = value;
        break;
      case 5:
        core = 1 - core;
        break;
      default:
        head.length = value % (2 * kPayload);
    }
    payload.resize(head.length, std::byte{0x5a});
    reported_ |= head.kind == FrameKind::error;  // a worker may report any error
  }

  Box& box_;
  const uint32_t id_;
  std::mt19937& random_;
  TableInfo info_;
  std::vector<std::unique_ptr<RawRank>> ranks_;
  std::array<std::array<uint32_t, 100>, 2> step_{};    // [rank][unit]: of its next push
  std::array<std::array<bool, 100>, 2> in_flight_{};  // [rank][unit]
  bool reported_ = false;
};

}  // namespace

TEST(almost_right_frames_end_their_own_job_only) {
  const bool is_long = std::getenv("PHUB_TEST_LONG") != nullptr;
  const int frames = is_long ? 1000000 : 20000;
  std::mt19937 random(20240611);
  Box box(kCores);
  Bystander bystander(box);
  bystander.begin();  // opens all that it needs
  bystander.finish();
  const int before = open_descriptors();
  int sent = 0, jobs = 0;
  while (sent < frames) {
    bystander.begin();
    FuzzedJob job(box, static_cast<uint32_t>(++jobs), random);
    for (int round = 0; round < 100 && job.goes_on(); ++round)
      for (int burst = 0; burst < 8; ++burst) job.send();
    sent += job.sent;
    bystander.finish();
  }
  CHECK(sent < 200 * jobs);  // else no offence was one
  CHECK_EQUAL(open_descriptors(), before);
}

int main(int argc, char** argv) { return test::run(argc, argv); }
