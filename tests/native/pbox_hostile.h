// Workers whose frames a test makes one by one, and a job that must not notice them.
#pragma once

#include "pbox_box.h"

namespace test {

inline constexpr int kCores = 2;
inline constexpr size_t kPayload = 4096;
inline const Transport kBoth[] = {{"tcp"}, {"shm", false}};

// A job of two workers that is in the middle of an exchange while something else happens, and
// checks every element of the answer afterwards.
class Bystander {
 public:
  explicit Bystander(Box& box) : box_(box), info_(table_of({{3000}, {10}}, kCores)) {
    ranks_ = box.job(kJob, 2, {"tcp"});
    box.table(kJob, ranks_, info_);
    memories_.assign(2, Floats(info_.bytes / sizeof(float)));
  }
  ~Bystander() { box_.server.drop_job(kJob); }

  void begin() {
    ++step_;
    push(0);
  }
  void finish() {
    push(1);
    for (size_t rank = 0; rank < 2; ++rank) {
      wait_all(*ranks_[rank], info_.id);
      for (size_t i = 0; i < 3000; ++i) CHECK_EQUAL(memories_[rank][i], 2 * value(i));
    }
  }

 private:
  static constexpr uint32_t kJob = 1 << 30;

  float value(size_t i) const { return static_cast<float>((i + step_) % 100); }
  void push(size_t rank) {
    for (size_t i = 0; i < memories_[rank].size(); ++i) memories_[rank][i] = value(i);
    push_all(*ranks_[rank], info_, 0, memories_[rank]);
  }

  Box& box_;
  const TableInfo info_;
  std::vector<std::unique_ptr<Worker>> ranks_;
  std::vector<Floats> memories_;
  size_t step_ = 0;
};

// A rank whose lanes the test drives frame by frame.
struct RawRank {
  std::vector<std::unique_ptr<End>> ends;

  RawRank(Box& box, uint32_t job, int rank, const Transport& transport, size_t ring = 0) {
    for (int core = 0; core < box.server.cores(); ++core) {
      ends.push_back(std::make_unique<End>());
      ends.back()->attach(box.lane(job, rank, core, transport, kPayload, ring));
    }
  }
  void send(int core, Header head, const void* payload = nullptr) {
    static const std::vector<std::byte> noise(64 << 10);
    Lane& lane = *ends[static_cast<size_t>(core)]->lane;
    lane.send_copy(head, payload ? payload : noise.data());
    step();
  }
  void step() {
    for (auto& end : ends) end->step();
  }
};

inline Header frame(FrameKind kind, uint32_t id, size_t length, uint8_t flags = 0) {
  return {kind, flags, 1, id, 0, static_cast<uint32_t>(length)};
}

}  // namespace test
