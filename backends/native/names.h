// What a rank knows about the names of collectives: what it announced, and what each other rank
// announced and sent for uses that were not submitted here yet.
//
// A use of a name is its n-th submission. An announcement (an open frame) holds from one use on,
// until the next one of the same name and rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operation.h"

namespace phub {

inline constexpr uint32_t kNoNumber = UINT32_MAX;

// One other rank's side of a name.
class Remote {
 public:
  struct EarlyFrame {
    uint32_t use, part;
    std::vector<std::byte> payload;
  };

  void open(uint32_t use, const Spec& spec);
  // The rank has submitted all uses up to `use`: what it announced for them holds.
  void post(uint32_t use) { posted_ = use + 1; }
  bool has_posted(uint32_t use) const { return posted_ > use; }
  void keep(EarlyFrame frame) { early_.push_back(std::move(frame)); }
  // The frames kept for `use`; they are forgotten.
  std::vector<EarlyFrame> take(uint32_t use);

  // What holds for `use` as far as is known here, or nullptr.
  const Spec* spec(uint32_t use) const;
  // Uses before `use` are over.
  void forget_before(uint32_t use);

 private:
  struct Announced {
    uint32_t from_use;
    Spec spec;
  };
  std::deque<Announced> announced_;
  std::deque<EarlyFrame> early_;
  uint32_t posted_ = 0;  // uses that the rank has submitted
};

struct Name {
  std::string text;
  uint32_t number = kNoNumber;  // this rank's, once announced
  uint32_t next_use = 0;        // of a submission here
  std::optional<Spec> announced;  // to all ranks,
  uint32_t announced_at = 0;      // from this use on
  std::shared_ptr<Operation> operation;  // in flight: use next_use - 1
  std::vector<Remote> remotes;           // by rank

  bool in_flight(uint32_t use) const { return operation && operation->use() == use; }
};

// The payload of an open frame.
std::vector<std::byte> encode_open(const Spec& spec, const std::string& name);
// Throws Error(protocol) when it is none.
Spec decode_open(const std::byte* payload, size_t length, std::string& name);

// The payload of an error frame.

}  // namespace phub
