// Collectives between workers: every rank has a lane to every other, and runs operations by their
// plans. Operations are matched by (name, use), so ranks may submit names in different orders.
//
// Before the data of a use:
//   open    the first use of a name, or one that differs from the last, is announced to all ranks:
//           whoever has submitted, or submits, something else fails that use, naming both sides.
//           Later uses cost no announcement.
//   posted  tells those who send to a rank that it has submitted a use: their credit. Without it
//           only small transfers may go, and of those only so many to one peer.
// A receiver reads always: what is not submitted here yet is kept aside, bounded by that limit.
//
// A lost peer ends the mesh: nothing new can be submitted. Of the operations in flight those fail
// that need it, and then, by an error frame for that use, those on other ranks that need a rank on
// which it failed. All errors name who was lost.
//
// Thread contract: public methods take the engine's lock themselves and may be called from any
// thread; the overrides of Sink are called by the engine, with the lock held.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine.h"
#include "names.h"
#include "operation.h"

namespace phub {

struct MeshOptions {
  size_t frame_bytes = 128 << 10;   // payload of a data frame; a multiple of 8
  size_t window = 4;                // parts of an operation in flight
  size_t eager_bytes = 32 << 10;    // a transfer up to this size need not wait for `posted`,
  size_t eager_window = 256 << 10;  // up to so many bytes to one peer
};

class Mesh : public Sink, private Carrier {
 public:
  Mesh(Engine& engine, int rank, int size, const MeshOptions& options);
  ~Mesh() override;
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  void attach(int peer, std::unique_ptr<Lane> lane);
  // Starts an operation in place on `buffer`, which must stay until it is done. Throws
  // Error(duplicate) when the name is in flight here, or the error that ended the mesh.
  std::shared_ptr<Operation> submit(const std::string& name, const Spec& spec, std::byte* buffer,
                                    const Operation::Plans& plans);
  // Finished or failed; the buffer is free.
  bool done(const Operation& operation);
  // Drives until done; false when timeout_s passed first. Throws the operation's error.
  bool wait(const Operation& operation, double timeout_s);
  // Ranks that an unfinished operation waits for.
  std::vector<int> missing(const Operation& operation);
  // Finishes what is in flight, says bye and removes the lanes, within about timeout_s.
  void close(double timeout_s);
  LaneCounters counters();

  std::byte* destination(Lane& lane, const Header& header) override;
  void frame(Lane& lane, const Header& header, const std::byte* payload) override;
  void closed(Lane& lane, const Error& why) override;
  void flushed(Lane& lane) override;
  size_t awaited(const Lane& lane) override;

 private:
  struct EagerSend {
    uint32_t number, use;
    size_t bytes;
  };
  struct Peer {
    Lane* lane = nullptr;  // nullptr: removed
    bool bye = false;      // it has said that it leaves
    bool gone = false;     // its lane is closed
    std::vector<Name*> names;               // by the peer's numbers
    std::vector<EagerSend> eager;           // sent without credit
    size_t eager_bytes = 0;                 // the sum of those
    size_t early_bytes = 0;                 // kept from it for uses not submitted here
    std::shared_ptr<Operation> placing;     // whose buffer its lane is writing into
  };

  bool may_send(const Operation& operation, int peer, size_t bytes) override;
  void send(const Operation& operation, int peer, uint32_t part, const std::byte* data,
            size_t bytes, size_t* unsent) override;

  Name& name_of(const std::string& text);
  Name& name_of(Peer& peer, uint32_t number);
  void throw_if_over(const std::string& name) const;
  void announce(Name& name, const Operation& operation);
  void compare(const Name& name, int rank);
  Error disagreement(const Name& name, int rank, const Spec* theirs) const;
  std::vector<int> unconfirmed(const Name& name, const Operation& operation) const;
  void take_early(Name& name);

  void on_open(int rank, const Header& header, const std::byte* payload);
  void on_error(int rank, const Header& header, const std::byte* payload);
  void begun(int rank, Name& name, uint32_t use);
  void on_data(int rank, const Header& header, const std::byte* payload);

  void control(int peer, FrameKind kind, uint32_t id, uint32_t step,
               const std::vector<std::byte>& payload = {});
  void settle(const std::shared_ptr<Operation>& operation);
  void advance_all();
  bool needs(const Operation& operation, int rank) const;
  void fail(const std::shared_ptr<Operation>& operation, const Error& error);
  void remove_lanes();
  std::vector<int> all_ranks() const;
  std::vector<int> missing_ranks(const Operation& operation) const;

  Engine& engine_;
  const int rank_, size_;
  const MeshOptions options_;
  std::vector<Peer> peers_;  // by rank; the own entry stays empty
  std::unordered_map<std::string, std::unique_ptr<Name>> names_;
  std::vector<Name*> numbered_;  // by this rank's numbers
  std::vector<std::shared_ptr<Operation>> flying_;
  std::optional<Error> failed_;  // why nothing more can be submitted
  bool closing_ = false;
  LaneCounters past_;  // of lanes that are removed
};

}  // namespace phub
