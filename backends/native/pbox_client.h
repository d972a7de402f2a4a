// The worker's end of a PBox: pushes keys, receives their answers into the same memory.
//
// Thread contract: public methods take the engine's lock themselves and may be called from any
// thread; as a Sink it is called by the engine, with the lock held.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine.h"
#include "packer.h"
#include "table.h"

namespace phub {

// What one server calls a table's first key, chunk and parameter group.
struct WireIds {
  uint32_t key = 0, chunk = 0, group = 0;
};

class PboxClient : public Sink {
 public:
  // cores: of each server, where several share the job's chunks (shards). Lane i then leads to core
  // i mod cores of server i / cores, and so do the chunks of a table. 0: there is one server.
  PboxClient(Engine& engine, int rank, int cores = 0);
  ~PboxClient() override;

  void attach(int core, std::unique_ptr<Lane> lane);
  // A table as registered on all servers, and what each of them calls it (none given: the one
  // server, whose ids are in `info`); with shared_answers, its two answer memories.
  void add(TableInfo info, std::vector<std::shared_ptr<Memory>> answers,
           std::vector<WireIds> servers = {});
  // Later calls with this table throw. Answers that are still to come are thrown away, but what was
  // pushed must stay valid until `close`, since it may not have left.
  void drop(uint32_t table);

  // Starts one exchange of a key. `memory` points at the key's first byte; the answer replaces it
  // (except in a shared model) and it must stay valid and unchanged until then. Unused when the
  // gradient stands in the shared arena. flags: flag::no_grad, flag::init. Packs the gradient first
  // where the table has a compression.
  void push(uint32_t table, uint32_t key, uint8_t flags, std::byte* memory);
  // Asks for the current weights of a key into `memory` (server optimizer, model not shared).
  void pull(uint32_t table, uint32_t key, std::byte* memory);
  // Asks for one of a key's arrays in the accumulator's type into `memory` (server optimizer).
  // array: 0 for the weights (of 16-bit keys), then the optimizer's state.
  void read_state(uint32_t table, uint32_t key, uint8_t array, std::byte* memory);
  // Steps that the state which was read last has in it.
  uint32_t taken(uint32_t table, uint32_t key);
  // Sets such an array before this rank's next push. `memory` is copied.
  void write_state(uint32_t table, uint32_t key, uint8_t array, uint32_t taken,
                   const std::byte* memory);
  // Hyperparameters of a table's parameter group for all later pushes.
  void set_hyper(uint32_t table, uint32_t group, const HyperWire& hyper);

  // Answered, or failed. Moves lanes, never sleeps.
  bool done(uint32_t table, uint32_t key);
  // Blocks until the key (or, with kAllKeys, the whole table) is answered. False after timeout_s.
  // Throws the error that ended the job.
  bool wait(uint32_t table, uint32_t key, double timeout_s);
  static constexpr uint32_t kAllKeys = UINT32_MAX;

  // Ends the job for this worker: later calls throw this.
  void fail(const Error& error);
  // Tells the cores that this end closes in good order, or the error that ended the job here, and
  // closes the lanes. No memory of the caller is used from then on.
  void close();
  bool failed();  // the job is over for this rank, whatever the reason
  LaneCounters counters();

  std::byte* destination(Lane& lane, const Header& header) override;
  void frame(Lane& lane, const Header& header, const std::byte* payload) override;
  void closed(Lane& lane, const Error& why) override;
  void flushed(Lane&) override { post(); }

 private:
  struct Shard;
  struct Parcel {
    Lane* lane;
    Header header;
    const std::byte* payload;
    const Shard* shard;
    uint32_t key;
  };
  struct Key {
    uint32_t step = 0;         // exchanges finished
    uint32_t outstanding = 0;  // frames of answer that are still to come
    bool pulling = false;      // this answer finishes no exchange
    std::byte* memory = nullptr;
    uint32_t taken = 0;  // of the state that was read last
    std::vector<uint16_t> cores;  // that own chunks of it (in place only)
  };
  struct Shard {
    TableInfo info;
    std::vector<WireIds> ids;  // by server
    std::vector<std::shared_ptr<Memory>> answers;
    std::shared_ptr<Packer> packer;  // of a table with a compression
    std::vector<Key> keys;
    std::vector<uint8_t> pending;  // per chunk: answers to come
    uint32_t outstanding = 0;      // keys without their answer
    bool dropped = false;          // lives on for the answers that are still to come
  };
  using Firsts = std::map<uint64_t, Shard*>;  // by server and first id on its wire
  struct Place {
    Shard* shard;
    uint32_t index;
  };
  Shard& shard(uint32_t table);
  Key& startable(Shard& shard, uint32_t key);  // throws when it is in flight
  static size_t index_of(const Lane& lane) { return reinterpret_cast<size_t>(lane.owner); }
  size_t server_of(size_t lane) const { return cores_ ? lane / cores_ : 0; }
  Place find(const Firsts& firsts, const Lane& lane, uint32_t id) const;
  Place chunk_at(const Lane& lane, uint32_t id) const;  // throws when there is none
  Place key_at(const Lane& lane, uint32_t id) const;    // likewise
  const std::byte* content(const Shard& shard, uint32_t index, uint8_t flags) const;
  void send_chunks(Shard& shard, uint32_t key, FrameKind kind, uint8_t flags);
  void expect(Shard& shard, uint32_t key, uint32_t index);
  std::deque<Parcel>::iterator place_in_outbox(const Shard& shard, uint32_t key);
  void post();
  void send_key(Shard& shard, uint32_t key, uint8_t flags);
  void started(Shard& shard);
  void copy_answer(Shard& shard, uint32_t index, const Header& header);
  size_t answer_bytes(const Shard& shard, const Lane& lane, uint32_t index) const;
  void answered(Shard& shard, Lane& lane, uint32_t key, size_t bytes);
  void forget(Shard& shard);
  void remove_lanes();
  void throw_if_failed() const;
  void set_expectations(const Shard& shard, uint32_t key);

  Engine& engine_;
  const int rank_;
  const size_t cores_;                 // see the constructor
  std::vector<Lane*> lanes_;           // by core, of all servers
  std::vector<size_t> outstanding_;    // by core: bytes of answers to come
  std::map<uint32_t, std::unique_ptr<Shard>> tables_;  // by id
  Firsts by_chunk_, by_key_;
  // Chunks in the order of their pushes, which all workers share, so that the chunks of all of them
  // meet early: lanes compete for one link, and a lane that ran ahead would only have its chunks
  // wait at the core for those that others' lanes hold back.
  // Where first keys go first a chunk overtakes those of later keys of its table.
  std::deque<Parcel> outbox_;
  size_t unsent_ = 0;  // frames out of the outbox that lanes hold
  uint32_t outstanding_keys_ = 0;
  bool driven_ = false;  // the background thread was asked to drive
  bool closing_ = false;
  LaneCounters past_;  // of lanes that are closed
  std::optional<Error> failed_;
};

}  // namespace phub
