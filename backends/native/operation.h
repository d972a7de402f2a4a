// One collective in flight on this rank: a state machine that runs a plan, part by part.
//
// Words:
//   part     a slice of the buffer that runs the whole plan by itself. A large buffer is cut into
//            parts so that a part's bytes are still in the cache when its next step needs them.
//            A few parts are in flight at once, so that one can go on while another waits.
//   partial  a sum that lacks contributions. 16-bit floats are summed, and partial sums of them
//            are sent, as fp32: the result is rounded once.
//
// Thread contract: none; used with the engine's lock held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/types.h"
#include "plan.h"

namespace phub {

enum class CollectiveKind : uint8_t { allreduce = 0, broadcast = 1, barrier = 2 };

// What all ranks must agree about.
struct Spec {
  CollectiveKind kind = CollectiveKind::allreduce;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  size_t count = 0;       // elements
  size_t part_count = 0;  // elements of a part; the last one may be shorter
  uint64_t algorithm = 0;
  double prescale = 1.0, postscale = 1.0;

  bool operator==(const Spec&) const = default;
  std::string describe() const;  // "allreduce sum float32 [100]"
};

class Operation;

// How an operation sends; the mesh is one.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // False: the peer is not ready for so much; `advance` is called when it is.
  virtual bool may_send(const Operation& operation, int peer, size_t bytes) = 0;
  // `unsent` as in Lane::send.
  virtual void send(const Operation& operation, int peer, uint32_t part, const std::byte* data,
                    size_t bytes, size_t* unsent) = 0;
};

class Operation {
 public:
  // The plans of a whole part and of the last one (the same object when it is a whole one).
  struct Plans {
    std::shared_ptr<const Plan> whole, last;
  };

  Operation(std::string name, uint32_t number, uint32_t use, const Spec& spec, int ranks,
            std::byte* buffer, Plans plans, size_t window, Carrier& carrier);

  const std::string& name() const { return name_; }
  uint32_t number() const { return number_; }
  uint32_t use() const { return use_; }
  const Spec& spec() const { return spec_; }
  std::vector<int> receivers() const;  // peers that this rank sends to
  std::vector<int> senders() const;    // peers that it receives from

  // Does what can be done now: starts parts, sends, retires parts.
  void advance();
  // Where a frame's payload for this part may be written straight away, or nullptr.
  std::byte* destination(int peer, uint32_t part, size_t bytes);
  // The lane that was given a destination has written to it, or never will.
  void placed();
  // The payload of a frame. Throws Error(protocol) when the plan expects no such bytes.
  void receive(int peer, uint32_t part, const std::byte* payload, size_t bytes);

  // Everybody who must have submitted this use has: it may settle.
  void confirm();
  void fail(const Error& error);
  const std::optional<Error>& error() const { return error_; }
  // Finished and confirmed, or failed; and no lane reads or writes the buffer any more.
  bool settled() const { return settled_; }
  bool needs(int peer) const;  // something is still to come from this peer or to be sent to it
  // Bytes that must come from `peer` before a part can go on; 0: none waits for it.
  size_t awaited(int peer) const;
  std::vector<int> missing() const;  // peers that parts wait for

 private:
  struct Early {  // came before its turn
    int peer;
    std::vector<std::byte> bytes;
  };
  struct Part {
    enum class State : uint8_t { waiting, active, retired };
    State state = State::waiting;
    bool finished = false;  // the owned ranges are results
    uint32_t send_step = 0, recv_step = 0;  // first step whose send / receive is not done
    size_t received = 0;    // bytes of the receive of recv_step
    size_t unsent = 0;      // frames that lanes have not sent yet
    std::unique_ptr<std::byte[]> sums;  // fp32 accumulators of 16-bit floats
    std::deque<Early> early;
  };

  bool has_sums() const { return item_ != partial_item_; }
  const Plan& plan(size_t part) const {
    return part + 1 < parts_.size() ? *plans_.whole : *plans_.last;
  }
  Part& part_at(uint32_t index);
  std::byte* place(size_t index, size_t element, bool result);
  size_t awaited_bytes(size_t index) const;  // of the current receive
  int awaited_peer(size_t index) const;
  int blocking_peer(size_t index) const;

  void start(size_t index);
  void prepare(size_t index);
  void run(size_t index);
  void send_steps(size_t index);
  void apply(size_t index, const std::byte* payload, size_t bytes);
  bool apply_early(size_t index);
  void keep_early(size_t index, int peer, const std::byte* payload, size_t bytes);
  void finish(size_t index);
  bool complete(size_t index) const;
  void retire();
  void settle();

  const std::string name_;
  const uint32_t number_, use_;
  const Spec spec_;
  const int ranks_;
  std::byte* const buffer_;
  const Plans plans_;
  const size_t window_;  // parts in flight
  Carrier& carrier_;
  const size_t item_, partial_item_;  // bytes of an element of a result and of a partial sum

  std::vector<Part> parts_;
  std::vector<uint32_t> active_;  // indices
  size_t next_ = 0;               // first part that was never started by `advance`
  size_t retired_ = 0;
  size_t placing_ = 0;            // frames that lanes are writing into the buffer
  std::optional<Error> error_;
  bool confirmed_ = false;
  bool settled_ = false;
};

}  // namespace phub
