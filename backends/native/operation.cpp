#include "operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu.h"

namespace phub {
namespace {

constexpr const char* kKinds[] = {"allreduce", "broadcast", "barrier"};
constexpr const char* kOps[] = {"sum", "average", "min", "max", "product"};
constexpr const char* kTypes[] = {"float32", "float64", "float16", "bfloat16", "int32",
                                  "int64",   "uint8",   "int8",    "bool"};

size_t parts_of(const Spec& spec) {
  return spec.count == 0 ? 0 : (spec.count + spec.part_count - 1) / spec.part_count;
}

void append(std::vector<int>& ranks, const std::vector<int>& more) {
  for (int rank : more)
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

[[noreturn]] void contradicts(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::protocol, "[mesh] a frame of '" + name + "' " + what);
}

}  // namespace

std::string Spec::describe() const {
  std::string text = kKinds[static_cast<size_t>(kind)];
  if (kind == CollectiveKind::barrier) return text;
  if (kind == CollectiveKind::allreduce) text += std::string(" ") + kOps[static_cast<size_t>(op)];
  text +=
      std::string(" ") + kTypes[static_cast<size_t>(dtype)] + " [" + std::to_string(count) + "]";
  if (kind == CollectiveKind::broadcast) return text + " root " + std::to_string(root);
  if (prescale != 1.0) text += " prescale " + std::to_string(prescale);
  if (postscale != 1.0) text += " postscale " + std::to_string(postscale);
  return text;
}

Operation::Operation(std::string name, uint32_t number, uint32_t use, const Spec& spec, int ranks,
                     std::byte* buffer, Plans plans, size_t window, Carrier& carrier)
    : name_(std::move(name)),
      number_(number),
      use_(use),
      spec_(spec),
      ranks_(ranks),
      buffer_(buffer),
      plans_(std::move(plans)),
      window_(std::max<size_t>(window, 1)),
      carrier_(carrier),
      item_(item_size(spec.dtype)),
      partial_item_(spec.kind == CollectiveKind::allreduce ? item_size(accumulator_type(spec.dtype))
                                                           : item_),
      parts_(parts_of(spec)) {
  const size_t last = spec.count - (parts_.empty() ? 0 : (parts_.size() - 1) * spec.part_count);
  if (plans_.last->count() != last ||
      (parts_.size() > 1 && plans_.whole->count() != spec.part_count))
    throw Error(ErrorCode::config, "[mesh] '" + name_ + "': expected plans of its parts' sizes");
}

std::vector<int> Operation::receivers() const {
  std::vector<int> ranks;
  if (parts_.size() > 1) append(ranks, plans_.whole->receivers());
  append(ranks, plans_.last->receivers());
  return ranks;
}

std::vector<int> Operation::senders() const {
  std::vector<int> ranks;
  if (parts_.size() > 1) append(ranks, plans_.whole->senders());
  append(ranks, plans_.last->senders());
  return ranks;
}

Operation::Part& Operation::part_at(uint32_t index) {
  if (index >= parts_.size()) contradicts(name_, "is for part " + std::to_string(index));
  return parts_[index];
}

// An element of a part: in the buffer, or among the sums where those are apart.
std::byte* Operation::place(size_t index, size_t element, bool result) {
  if (!result && has_sums()) return parts_[index].sums.get() + element * partial_item_;
  return buffer_ + (index * spec_.part_count + element) * item_;
}

size_t Operation::awaited_bytes(size_t index) const {
  const Step& step = plan(index).steps()[parts_[index].recv_step];
  return step.recv.size() * (step.reduce ? partial_item_ : item_);
}

int Operation::awaited_peer(size_t index) const {
  const Part& part = parts_[index];
  const auto& steps = plan(index).steps();
  return part.recv_step < steps.size() ? steps[part.recv_step].recv_from : kNobody;
}

// --- moving on ---

void Operation::advance() {
  if (error_) return settle();
  for (uint32_t index : active_) run(index);
  retire();
  while (active_.size() < window_ && next_ < parts_.size()) {
    if (parts_[next_].state == Part::State::waiting) start(next_);
    retire();
    ++next_;
  }
  settle();
}

void Operation::start(size_t index) {
  parts_[index].state = Part::State::active;
  active_.push_back(static_cast<uint32_t>(index));
  prepare(index);
  run(index);
}

// Applies the prescale, and makes the sums where they are apart.
void Operation::prepare(size_t index) {
  Part& part = parts_[index];
  if (spec_.kind != CollectiveKind::allreduce) return;
  const size_t count = plan(index).count();
  if (has_sums())
    part.sums = std::make_unique_for_overwrite<std::byte[]>(count * partial_item_);
  else if (spec_.prescale == 1.0)
    return;
  fold(spec_.dtype, spec_.op, place(index, 0, false), place(index, 0, true), count, true,
       {spec_.prescale, 1.0, 1});
}

void Operation::run(size_t index) {
  Part& part = parts_[index];
  const Plan& plan = this->plan(index);
  const auto& steps = plan.steps();
  do {
    while (part.recv_step < steps.size() && steps[part.recv_step].recv_from == kNobody)
      ++part.recv_step;
    if (!part.finished && part.recv_step >= plan.finish_at()) finish(index);
    send_steps(index);
  } while (apply_early(index));
}

// Stops at a peer that is not ready; receiving goes on meanwhile.
void Operation::send_steps(size_t index) {
  Part& part = parts_[index];
  const Plan& plan = this->plan(index);
  for (; part.send_step < plan.steps().size() && part.send_step <= part.recv_step;
       ++part.send_step) {
    const Step& step = plan.steps()[part.send_step];
    if (step.send_to == kNobody) continue;
    const bool result = plan.sends_result(part.send_step);
    const size_t bytes = step.send.size() * (result ? item_ : partial_item_);
    if (!carrier_.may_send(*this, step.send_to, bytes)) return;
    carrier_.send(*this, step.send_to, static_cast<uint32_t>(index),
                  place(index, step.send.begin, result), bytes, &part.unsent);
  }
}

// Makes results of the sums that this rank owns.
void Operation::finish(size_t index) {
  parts_[index].finished = true;
  if (spec_.kind != CollectiveKind::allreduce) return;
  const bool floating = spec_.dtype <= DType::bf16;
  const bool average = spec_.op == ReduceOp::average;
  const Scale scale{1.0, spec_.postscale / (floating && average ? ranks_ : 1),
                    average ? ranks_ : 1};
  if (!has_sums() && (floating ? scale.post == 1.0 : !average)) return;
  for (const Range& range : plan(index).owned())
    phub::finish(spec_.dtype, spec_.op, place(index, range.begin, true),
                 place(index, range.begin, false), range.size(), scale);
}

bool Operation::complete(size_t index) const {
  const Part& part = parts_[index];
  const size_t steps = plan(index).steps().size();
  return part.send_step == steps && part.recv_step == steps && part.unsent == 0;
}

void Operation::retire() {
  const auto done = [&](uint32_t index) {
    Part& part = parts_[index];
    if (!complete(index)) return false;
    part.state = Part::State::retired;
    part.sums.reset();
    ++retired_;
    return true;
  };
  std::erase_if(active_, done);
}

void Operation::settle() {
  if (settled_ || placing_ > 0) return;
  if (error_) {
    const auto sending = [&](uint32_t index) { return parts_[index].unsent > 0; };
    settled_ = std::none_of(active_.begin(), active_.end(), sending);
  } else {
    settled_ = confirmed_ && retired_ == parts_.size();
  }
}

void Operation::confirm() {
  confirmed_ = true;
  settle();
}

void Operation::fail(const Error& error) {
  if (settled_ || error_) return;
  error_ = error;
  settle();
}

// --- receiving ---

std::byte* Operation::destination(int peer, uint32_t index, size_t bytes) {
  Part& part = part_at(index);
  if (error_ || part.state == Part::State::retired) return nullptr;
  if (part.state == Part::State::waiting) start(index);
  if (awaited_peer(index) != peer) return nullptr;
  const Step& step = plan(index).steps()[part.recv_step];
  if (step.reduce || bytes > awaited_bytes(index) - part.received) return nullptr;
  ++placing_;
  return place(index, step.recv.begin, true) + part.received;
}

void Operation::receive(int peer, uint32_t index, const std::byte* payload, size_t bytes) {
  Part& part = part_at(index);
  if (error_) return;
  if (part.state == Part::State::retired) contradicts(name_, "came after its part was complete");
  if (part.state == Part::State::waiting) start(index);
  if (awaited_peer(index) == peer)
    apply(index, payload, bytes);
  else
    keep_early(index, peer, payload, bytes);
  run(index);
  if (complete(index)) advance();
}

void Operation::placed() {
  --placing_;
  settle();
}

void Operation::apply(size_t index, const std::byte* payload, size_t bytes) {
  Part& part = parts_[index];
  const Step& step = plan(index).steps()[part.recv_step];
  const size_t total = awaited_bytes(index), item = step.reduce ? partial_item_ : item_;
  if (bytes > total - part.received || bytes % item != 0)
    contradicts(name_, "has " + std::to_string(bytes) + " bytes, expected at most " +
                           std::to_string(total - part.received));
  std::byte* target = place(index, step.recv.begin, !step.reduce) + part.received;
  if (step.reduce)
    fold(accumulator_type(spec_.dtype), spec_.op, target, payload, bytes / item, false);
  else if (target != payload)
    std::memcpy(target, payload, bytes);
  part.received += bytes;
  if (part.received < total) return;
  part.received = 0;
  ++part.recv_step;
}

void Operation::keep_early(size_t index, int peer, const std::byte* payload, size_t bytes) {
  Part& part = parts_[index];
  const auto& steps = plan(index).steps();
  size_t room = 0;  // what may still come from this peer
  for (size_t i = part.recv_step; i < steps.size(); ++i)
    if (steps[i].recv_from == peer)
      room += steps[i].recv.size() * (steps[i].reduce ? partial_item_ : item_);
  for (const Early& early : part.early)
    if (early.peer == peer) room -= std::min(room, early.bytes.size());
  if (bytes > room) contradicts(name_, "from rank " + std::to_string(peer) + " is not in the plan");
  part.early.push_back({peer, {payload, payload + bytes}});
}

// Applies one frame that came before its turn, if its turn has come.
bool Operation::apply_early(size_t index) {
  Part& part = parts_[index];
  const int peer = awaited_peer(index);
  if (peer == kNobody) return false;
  const auto found = std::find_if(part.early.begin(), part.early.end(),
                                  [&](const Early& early) { return early.peer == peer; });
  if (found == part.early.end()) return false;
  const std::vector<std::byte> bytes = std::move(found->bytes);
  part.early.erase(found);
  apply(index, bytes.data(), bytes.size());
  return true;
}

// --- what it waits for ---

bool Operation::needs(int peer) const {
  if (settled_ || error_) return false;
  const auto contains = [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), peer) != ranks.end();
  };
  if (next_ < parts_.size() && (contains(receivers()) || contains(senders()))) return true;
  for (uint32_t index : active_) {
    const Part& part = parts_[index];
    const auto& steps = plan(index).steps();
    for (size_t i = std::min(part.recv_step, part.send_step); i < steps.size(); ++i)
      if ((i >= part.recv_step && steps[i].recv_from == peer) ||
          (i >= part.send_step && steps[i].send_to == peer))
        return true;
  }
  return false;
}

size_t Operation::awaited(int peer) const {
  size_t least = 0;
  for (uint32_t index : active_) {
    if (awaited_peer(index) != peer) continue;
    const size_t rest = awaited_bytes(index) - parts_[index].received;
    if (least == 0 || rest < least) least = rest;
  }
  return least;
}

int Operation::blocking_peer(size_t index) const {
  const Part& part = parts_[index];
  const auto& steps = plan(index).steps();
  const bool may = part.send_step < steps.size() && part.send_step <= part.recv_step;
  return may ? steps[part.send_step].send_to : kNobody;
}

std::vector<int> Operation::missing() const {
  std::vector<int> ranks;
  for (uint32_t index : active_)
    for (int peer : {awaited_peer(index), blocking_peer(index)})
      if (peer != kNobody) append(ranks, {peer});
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace phub
