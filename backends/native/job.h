// One core's part of one job: its lanes to the job's workers, and the chunks it owns. Everything
// in here is touched by the core's thread only: no lock, no queue.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lane.h"
#include "table.h"

namespace phub {

inline constexpr int kMaxWorkers = 256;
using RankSet = std::bitset<kMaxWorkers>;

// What has arrived for one exchange of a chunk (or of a key, where gradients are read in place).
struct Arrivals {
  uint32_t step = 0;  // number of exchanges finished
  RankSet arrived, with_gradient;
  bool init = false;  // this exchange sets the weights
  // Where each rank's push is a step of its own:
  std::vector<uint32_t> steps;  // by rank: number of exchanges that are applied
  RankSet waiting;              // applied, but not answered

  uint32_t finished(int rank) const {
    return steps.empty() ? step : steps[static_cast<size_t>(rank)];
  }
};

struct ChunkState {
  Arrivals arrivals;
  uint32_t taken = 0;  // steps that the optimizer's state has in it
  // Deterministic: contributions of ranks that came before those of lower ranks.
  std::map<int, std::vector<std::byte>> held;
  int in_order = 0;  // ranks below are folded, or have no gradient
};

struct KeyState {
  Arrivals arrivals;
  std::vector<uint32_t> chunks;  // indices in the table, of this core's chunks
  size_t next = 0;               // first of `chunks` that is not answered in this exchange
};

struct TableShard {
  std::shared_ptr<Table> table;
  std::optional<Error> ended;      // what those get who push it
  size_t unsent = 0;               // answers that lanes have queued from the table's memory
  std::vector<KeyState> keys;      // one per key of the table
  std::vector<ChunkState> chunks;  // one per chunk of the table; only this core's are used
};

struct Stalled {
  uint32_t key;                // id on the wire
  std::vector<int> missing;    // ranks that have not pushed it
};

// Told about what a worker did wrong or that it is gone.
struct JobEvent {
  uint32_t job;
  ErrorCode code;
  int rank;
  std::string text;
};

class JobShard {
 public:
  JobShard(uint32_t id, int workers, int core);

  const uint32_t id;
  const int workers;

  void attach(int rank, Lane& lane);
  void detach(Lane& lane);
  void leave(int rank);  // it said bye; throws Error(peer_lost) when others wait for it
  void add(std::shared_ptr<Table> table);
  void drop(uint32_t table_id);
  void forget_retired();  // tables that were dropped, once their last answer has left
  // No rank can exchange this table any more: `error` tells why. True when one waits for an answer.
  bool end(uint32_t table_id, const Error& error);
  // A frame of a worker. Throws Error(protocol) when it contradicts the key table.
  void frame(int rank, const Header& header, const std::byte* payload);
  // Answers up to `chunks` chunks of keys that are complete; true when there was something to do.
  bool work(int chunks);
  // Ends the job on this core: every worker gets the error, later frames are ignored.
  void fail(const Error& error);
  const std::optional<Error>& failed() const { return failed_; }
  std::vector<Stalled> stalled() const;
  uint64_t chunks_answered() const { return answered_; }

 private:
  struct Place {  // of a key or a chunk: the table's shard and the index in it
    TableShard* shard = nullptr;
    uint32_t index = 0;
    int rank = kAll;  // whose step it is
    static constexpr int kAll = -1;
  };
  struct Group {  // of parameters
    uint32_t states = 0;  // arrays of state that there are for it
    std::vector<std::optional<HyperWire>> values;  // by rank
  };
  using Tables = std::map<uint32_t, std::unique_ptr<TableShard>>;
  Tables::iterator find(uint32_t table_id);
  bool partial(const Arrivals& arrivals) const;  // some ranks have come, others have not
  Place key_at(uint32_t id);
  Place chunk_at(uint32_t id);
  Arrivals& arrive(const TableShard& shard, Arrivals& arrivals, int rank, const Header& header,
                   const char* what);
  bool complete(const Arrivals& arrivals) const;  // throws when nobody sent the initial weights
  [[noreturn]] void refuse_absent(int rank) const;
  void push(int rank, const Header& header, const std::byte* payload);
  void push_key(int rank, const Header& header);
  void ready(const Place& place);
  void pull(int rank, const Header& header);
  void state(int rank, const Header& header, const std::byte* payload);
  void set_hyper(int rank, const Header& header, const std::byte* payload);
  [[noreturn]] void report(int rank, const Header& header, const std::byte* payload) const;
  void check_reading(int rank) const;  // throws when it lets its answers pile up
  Update agreed_update(uint32_t group) const;
  Update update_of(uint32_t group, int rank) const;

  // answer.cpp: the arithmetic of a chunk, from first arrival to answer
  void fold(TableShard& shard, uint32_t index, int rank, const std::byte* payload, bool first);
  void fold_in_order(TableShard& shard, uint32_t index, int rank, const std::byte* payload,
                     size_t length);
  void optimize(TableShard& shard, uint32_t index, const Update& update);
  const std::byte* reduce_answer(TableShard& shard, uint32_t index);
  const std::byte* optimized_answer(TableShard& shard, uint32_t index);
  void answer_chunk(TableShard& shard, uint32_t index);
  void reduce_in_place(TableShard& shard, const KeyState& key, uint32_t index);
  void optimize_in_place(TableShard& shard, const KeyState& key, uint32_t index);
  void finish_key(const Place& place);
  void send_weights(TableShard& shard, uint32_t index, uint32_t step, int rank);

  // alone.cpp: steps of single ranks
  void step_alone(TableShard& shard, uint32_t index, int rank, const std::byte* payload);
  void optimize_alone(TableShard& shard, uint32_t index, int rank);
  void finish_alone(const Place& place);
  RankSet allowed(const TableInfo& info, const Arrivals& arrivals) const;
  void answer_allowed_chunk(TableShard& shard, uint32_t index);
  void answer_allowed_key(TableShard& shard, uint32_t index);
  void answer_allowed(TableShard& shard);

  const int core_;
  std::vector<Lane*> lanes_;  // by rank
  Tables tables_;  // by first chunk id
  std::map<uint32_t, TableShard*> by_key_;  // by first key id
  std::vector<std::unique_ptr<TableShard>> retired_;  // dropped, but with answers still to leave
  size_t chunks_ = 0;  // of tables that are not dropped
  std::map<uint32_t, Group> groups_;  // by the job's number
  std::deque<Place> ready_;  // complete keys, in the order of their answers
  RankSet left_;
  std::optional<Error> failed_;
  uint64_t answered_ = 0;
};

}  // namespace phub
