#include "mesh.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace phub {
namespace {

const std::string kWhy =
    ": its script returned early, or stopped with an error of its own (see its output)";

constexpr size_t kMaxNames = 1 << 20;
constexpr size_t kMaxParts = 1 << 16;  // numbered by 16 bits in a frame
constexpr double kCloseStep = 0.005;   // seconds between two looks at whether all has left

}  // namespace

Mesh::Mesh(Engine& engine, int rank, int size, const MeshOptions& options)
    : engine_(engine),
      rank_(rank),
      size_(size),
      options_(options),
      peers_(static_cast<size_t>(size)) {}

Mesh::~Mesh() {
  const Engine::Guard guard = engine_.lock();
  remove_lanes();
}

void Mesh::attach(int peer, std::unique_ptr<Lane> lane) {
  const Engine::Guard guard = engine_.lock();
  lane->peer = peer;
  lane->corked = true;  // whoever drives comes back to it, and so does `submit`
  peers_.at(static_cast<size_t>(peer)).lane = &engine_.add(std::move(lane), *this);
  engine_.kick();
}

// --- submitting ---

std::shared_ptr<Operation> Mesh::submit(const std::string& text, const Spec& spec,
                                        std::byte* buffer, const Operation::Plans& plans) {
  const Engine::Guard guard = engine_.lock();
  throw_if_over(text);
  Name& name = name_of(text);
  if (name.operation)
    throw Error(ErrorCode::duplicate, "[mesh] rank " + std::to_string(rank_) + " submitted '" +
                                          text +
                                          "' again before its last use was finished; wait for it, "
                                          "or give the two different names");
  if (spec.count > 0 && (spec.count - 1) / spec.part_count >= kMaxParts)
    throw Error(ErrorCode::config, "[mesh] '" + text + "' has more than " +
                                       std::to_string(kMaxParts) + " parts; make them larger");
  const uint32_t number =
      name.number == kNoNumber ? static_cast<uint32_t>(numbered_.size()) : name.number;
  const auto operation =
      std::make_shared<Operation>(text, number, name.next_use, spec, size_, buffer, plans,
                                  options_.window, static_cast<Carrier&>(*this));
  announce(name, *operation);
  name.operation = operation;
  ++name.next_use;
  flying_.push_back(operation);
  engine_.async_begin();
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) compare(name, rank);
  operation->advance();
  if (unconfirmed(name, *operation).empty()) operation->confirm();
  take_early(name);
  settle(operation);
  const auto queues = [](const Peer& peer) { return peer.lane && !peer.lane->idle(); };
  if (std::any_of(peers_.begin(), peers_.end(), queues)) engine_.progress_once();
  engine_.kick();
  return operation;
}

void Mesh::throw_if_over(const std::string& name) const {
  if (failed_) throw *failed_;
  if (closing_) throw Error(ErrorCode::config, "[mesh] '" + name + "' was submitted after close()");
  for (int rank = 0; rank < size_; ++rank)
    if (peers_[static_cast<size_t>(rank)].bye)
      throw Error(
          ErrorCode::peer_lost,
          "[mesh] '" + name + "' needs rank " + std::to_string(rank) + ", which has ended" + kWhy,
          rank);
}

Name& Mesh::name_of(const std::string& text) {
  auto& name = names_[text];
  if (!name) {
    name = std::make_unique<Name>();
    name->text = text;
    name->remotes.resize(static_cast<size_t>(size_));
  }
  return *name;
}

void Mesh::announce(Name& name, const Operation& operation) {
  if (name.announced != operation.spec()) {
    const auto payload = encode_open(operation.spec(), name.text);
    if (name.number == kNoNumber) {
      name.number = operation.number();
      numbered_.push_back(&name);
    }
    name.announced = operation.spec();
    name.announced_at = operation.use();
    for (int rank : all_ranks())
      control(rank, FrameKind::open, name.number, operation.use(), payload);
  }
  for (int rank : operation.senders())
    control(rank, FrameKind::posted, name.number, operation.use());
}

// Fails the operation in flight when `rank` is certain to have submitted something else for it.
void Mesh::compare(const Name& name, int rank) {
  const Remote& remote = name.remotes[static_cast<size_t>(rank)];
  Operation& operation = *name.operation;
  if (operation.error() || !remote.has_posted(operation.use())) return;
  const Spec* theirs = remote.spec(operation.use());
  if (theirs && *theirs == operation.spec()) return;
  operation.fail(disagreement(name, rank, theirs));
  if (name.announced_at != operation.use())  // so that the other rank fails it too
    control(rank, FrameKind::open, name.number, operation.use(),
            encode_open(operation.spec(), name.text));
}

Error Mesh::disagreement(const Name& name, int rank, const Spec* theirs) const {
  const auto side = [](int who, const Spec* spec) {
    return "rank " + std::to_string(who) + " submitted " + (spec ? spec->describe() : "nothing");
  };
  std::string first = side(rank_, &name.operation->spec()), second = side(rank, theirs);
  if (rank < rank_) std::swap(first, second);  // the same text on both ranks
  return Error(ErrorCode::mismatch, "[mesh] ranks disagree about '" + name.text + "': " + first +
                                        ", " + second + "; make them equal");
}

// Those who must have submitted a use before it may settle here, and have not: whom this rank sends
// to, and at an announcement all ranks. Else the root of a broadcast would finish before it learns
// that others disagree.
std::vector<int> Mesh::unconfirmed(const Name& name, const Operation& operation) const {
  std::vector<int> ranks =
      name.announced_at == operation.use() ? all_ranks() : operation.receivers();
  std::erase_if(ranks, [&](int rank) {
    return rank == rank_ || name.remotes[static_cast<size_t>(rank)].has_posted(operation.use());
  });
  return ranks;
}

std::vector<int> Mesh::all_ranks() const {
  std::vector<int> ranks(static_cast<size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void Mesh::take_early(Name& name) {
  const std::shared_ptr<Operation> operation = name.operation;
  for (int rank = 0; rank < size_; ++rank) {
    Remote& remote = name.remotes[static_cast<size_t>(rank)];
    remote.forget_before(operation->use());
    for (const Remote::EarlyFrame& early : remote.take(operation->use())) {
      peers_[static_cast<size_t>(rank)].early_bytes -= early.payload.size();
      try {
        operation->receive(rank, early.part, early.payload.data(), early.payload.size());
      } catch (const Error& error) {
        peers_[static_cast<size_t>(rank)].lane->close(error, *this);
        return;
      }
    }
  }
}

// --- waiting ---

bool Mesh::done(const Operation& operation) {
  const Engine::Guard guard = engine_.lock();
  return operation.settled();
}

bool Mesh::wait(const Operation& operation, double timeout_s) {
  const bool done = engine_.wait([&] { return operation.settled(); }, timeout_s);
  if (!done) return false;
  if (operation.error()) throw *operation.error();
  return true;
}

std::vector<int> Mesh::missing(const Operation& operation) {
  const Engine::Guard guard = engine_.lock();
  return missing_ranks(operation);
}

// Where every rank announces itself, who has not is to blame, and not who waits for it in turn.
std::vector<int> Mesh::missing_ranks(const Operation& operation) const {
  if (operation.settled()) return {};
  const Name& name = *numbered_.at(operation.number());
  std::vector<int> ranks = unconfirmed(name, operation);
  return ranks.empty() ? operation.missing() : ranks;
}

// Afterwards `operation` is no longer in flight if it has settled.
void Mesh::settle(const std::shared_ptr<Operation>& operation) {
  if (!operation->settled()) return;
  const auto found = std::find(flying_.begin(), flying_.end(), operation);
  if (found == flying_.end()) return;
  numbered_[operation->number()]->operation.reset();
  flying_.erase(found);
  engine_.async_end();
  engine_.completed();
}

// The oldest first: it is the one most likely waited for, and gets what eager credit there is.
void Mesh::advance_all() {
  const std::vector<std::shared_ptr<Operation>> flying = flying_;  // settled ones leave
  for (const auto& operation : flying) {
    operation->advance();
    settle(operation);
  }
}

// --- sending (Carrier) ---

bool Mesh::may_send(const Operation& operation, int rank, size_t bytes) {
  Peer& peer = peers_.at(static_cast<size_t>(rank));
  const Name& name = *numbered_[operation.number()];
  if (name.remotes[static_cast<size_t>(rank)].has_posted(operation.use())) return true;
  if (bytes > options_.eager_bytes || peer.eager_bytes + bytes > options_.eager_window)
    return false;
  peer.eager_bytes += bytes;
  peer.eager.push_back({operation.number(), operation.use(), bytes});
  return true;
}

void Mesh::send(const Operation& operation, int rank, uint32_t part, const std::byte* data,
                size_t bytes, size_t* unsent) {
  Lane* lane = peers_[static_cast<size_t>(rank)].lane;
  Header header{FrameKind::data, 0, static_cast<uint16_t>(part), operation.number(),
                operation.use(), 0};
  for (size_t sent = 0; sent < bytes; sent += header.length) {
    header.length = static_cast<uint32_t>(std::min(bytes - sent, options_.frame_bytes));
    lane->send(header, data + sent, unsent);
  }
}

void Mesh::control(int rank, FrameKind kind, uint32_t id, uint32_t step,
                   const std::vector<std::byte>& payload) {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.lane || peer.gone) return;
  peer.lane->send_copy(
      {kind, 0, static_cast<uint16_t>(rank_), id, step, static_cast<uint32_t>(payload.size())},
      payload.data());
}

// --- receiving (Sink) ---

Name& Mesh::name_of(Peer& peer, uint32_t number) {
  if (number >= peer.names.size())
    throw Error(ErrorCode::protocol, "[mesh] a frame for name number " + std::to_string(number) +
                                         ", which was never announced");
  return *peer.names[number];
}

std::byte* Mesh::destination(Lane& lane, const Header& header) {
  if (header.kind != FrameKind::data) return nullptr;
  Peer& peer = peers_[static_cast<size_t>(lane.peer)];
  const Name& name = name_of(peer, header.id);
  if (!name.in_flight(header.step)) return nullptr;
  std::byte* place = name.operation->destination(lane.peer, header.sender, header.length);
  if (place) peer.placing = name.operation;
  return place;
}

void Mesh::frame(Lane& lane, const Header& header, const std::byte* payload) {
  Peer& peer = peers_[static_cast<size_t>(lane.peer)];
  if (const auto placed = std::exchange(peer.placing, nullptr)) {
    placed->placed();
    settle(placed);
  }
  switch (header.kind) {
    case FrameKind::open:
      return on_open(lane.peer, header, payload);
    case FrameKind::posted:
      return begun(lane.peer, name_of(peer, header.id), header.step);
    case FrameKind::data:
      return on_data(lane.peer, header, payload);
    case FrameKind::error:
      return on_error(lane.peer, header, payload);
    case FrameKind::bye:
      peer.bye = true;
      return;
    default:
      throw Error(ErrorCode::protocol, "[mesh] a frame of kind " +
                                           std::to_string(static_cast<int>(header.kind)) +
                                           " from another worker");
  }
}

void Mesh::on_open(int rank, const Header& header, const std::byte* payload) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  std::string text;
  const Spec spec = decode_open(payload, header.length, text);
  if (header.id > peer.names.size() || header.id >= kMaxNames)
    throw Error(ErrorCode::protocol, "[mesh] name number " + std::to_string(header.id) +
                                         " announced, expected " +
                                         std::to_string(peer.names.size()));
  Name& name = name_of(text);
  if (header.id == peer.names.size()) peer.names.push_back(&name);
  if (peer.names[header.id] != &name)
    throw Error(ErrorCode::protocol, "[mesh] name number " + std::to_string(header.id) +
                                         " announced again, as '" + text + "'");
  name.remotes[static_cast<size_t>(rank)].open(header.step, spec);
  begun(rank, name, header.step);
}

// `rank` has submitted this use, so it can take its data, and what it announced holds for it.
void Mesh::begun(int rank, Name& name, uint32_t use) {
  Remote& remote = name.remotes[static_cast<size_t>(rank)];
  if (remote.has_posted(use)) return;
  remote.post(use);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  std::erase_if(peer.eager, [&](const EagerSend& sent) {
    if (sent.number != name.number || sent.use > use) return false;
    peer.eager_bytes -= sent.bytes;
    return true;
  });
  if (name.in_flight(use)) {
    compare(name, rank);
    if (unconfirmed(name, *name.operation).empty()) name.operation->confirm();
  }
  advance_all();  // others may have waited for room among the eager bytes
}

void Mesh::on_data(int rank, const Header& header, const std::byte* payload) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Name& name = name_of(peer, header.id);
  begun(rank, name, header.step);
  if (header.step >= name.next_use) {
    peer.early_bytes += header.length;
    if (peer.early_bytes > options_.eager_window)
      throw Error(ErrorCode::protocol, "[mesh] more than " + std::to_string(options_.eager_window) +
                                           " bytes of '" + name.text + "' came without credit");
    name.remotes[static_cast<size_t>(rank)].keep(
        {header.step, header.sender, {payload, payload + header.length}});
  } else if (name.in_flight(header.step)) {
    const std::shared_ptr<Operation> operation = name.operation;
    operation->receive(rank, header.sender, payload, header.length);
    settle(operation);
  }  // else it is of a use that failed here
}

// `rank` has failed a use and will do nothing more for it.
void Mesh::on_error(int rank, const Header& header, const std::byte* payload) {
  const Name& name = name_of(peers_[static_cast<size_t>(rank)], header.id);
  const Error error = unpack_error(payload, header.length);
  if (!failed_) failed_ = error;
  if (name.in_flight(header.step) && needs(*name.operation, rank)) fail(name.operation, error);
}

void Mesh::flushed(Lane&) { advance_all(); }

size_t Mesh::awaited(const Lane& lane) {
  size_t least = kNothingAwaited;
  for (const auto& operation : flying_) {
    const Name& name = *numbered_[operation->number()];
    const bool posted = name.remotes[static_cast<size_t>(lane.peer)].has_posted(operation->use());
    // Without its `posted` an operation may be unable to send to this peer, or to settle.
    if (operation->error() || !posted) return 1;
    const size_t bytes = operation->awaited(lane.peer);
    if (bytes > 0) least = std::min(least, bytes);
  }
  return least;
}

// --- the end ---

bool Mesh::needs(const Operation& operation, int rank) const {
  if (operation.error()) return false;
  const std::vector<int> unconfirmed = this->unconfirmed(*numbered_[operation.number()], operation);
  return operation.needs(rank) ||
         std::find(unconfirmed.begin(), unconfirmed.end(), rank) != unconfirmed.end();
}

// All that the peer had sent has been received before.
void Mesh::closed(Lane& lane, const Error& why) {
  Peer& peer = peers_[static_cast<size_t>(lane.peer)];
  peer.gone = true;
  if (const auto placed = std::exchange(peer.placing, nullptr)) placed->placed();
  const std::string who = "[mesh] rank " + std::to_string(lane.peer);
  if (!failed_ && !peer.bye)
    failed_ =
        Error(why.code, who + " was lost, as rank " + std::to_string(rank_) + " saw: " + why.what(),
              lane.peer);
  for (const auto& operation : std::vector(flying_))
    if (needs(*operation, lane.peer))
      fail(operation, failed_ ? *failed_
                              : Error(ErrorCode::peer_lost,
                                      who + " has ended before '" + operation->name() +
                                          "' was finished" + kWhy,
                                      lane.peer));
  advance_all();  // what the lane had not sent counts as sent
}

// Fails one operation, and tells the others, who may need this rank for it.
void Mesh::fail(const std::shared_ptr<Operation>& operation, const Error& error) {
  operation->fail(error);
  const auto payload = pack_error(error);
  for (int rank : all_ranks()) {
    if (Lane* lane = peers_[static_cast<size_t>(rank)].lane) lane->corked = false;
    control(rank, FrameKind::error, operation->number(), operation->use(), payload);
  }
  settle(operation);
}

void Mesh::close(double timeout_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  engine_.wait([&] { return flying_.empty() || failed_; }, timeout_s);
  {
    const Engine::Guard guard = engine_.lock();
    if (std::exchange(closing_, true)) return;
    for (int rank : all_ranks()) control(rank, FrameKind::bye, 0, 0);
  }
  const auto all_left = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return !peer.lane || peer.gone || peer.lane->delivered();
    });
  };
  while (!engine_.wait(all_left, kCloseStep) && std::chrono::steady_clock::now() < end) {
  }
  const Engine::Guard guard = engine_.lock();
  remove_lanes();
}

void Mesh::remove_lanes() {
  closing_ = true;
  for (Peer& peer : peers_) {
    if (!peer.lane) continue;
    past_ += peer.lane->counters;
    engine_.remove(*std::exchange(peer.lane, nullptr));
    peer.gone = true;
    if (const auto placed = std::exchange(peer.placing, nullptr)) placed->placed();
  }
  for (const auto& operation : flying_)
    operation->fail(
        Error(ErrorCode::config, "[mesh] closed before '" + operation->name() + "' was finished"));
  advance_all();
}

LaneCounters Mesh::counters() {
  const Engine::Guard guard = engine_.lock();
  LaneCounters sum = past_;
  for (const Peer& peer : peers_)
    if (peer.lane) sum += peer.lane->counters;
  return sum;
}

}  // namespace phub
