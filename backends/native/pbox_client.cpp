#include "pbox_client.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/cpu.h"

namespace phub {
namespace {

// With less than this to come, the answer waits in the lane for whoever waits for it; with more
// the background thread takes it in, so that the server is not held up.
constexpr size_t kDriveBytes = 256 << 10;
// A sleeping waiter is woken at the latest when so much has arrived, to overlap copying.
constexpr size_t kWakeBytes = 128 << 10;

// Of chunks that lanes hold and could not send: so far one lane may run ahead of another. The more
// lanes there are the less each has, but with few of them a sender that seldom gets a processor,
// while the model computes, must not come to its turn in vain.
constexpr size_t kAheadBytes = 512 << 10, kLeastAheadBytes = 64 << 10;

// The results of a larger tensor would have left the cache before anybody reads them.
constexpr size_t kCachedBytes = 8 << 20;

uint64_t on_server(size_t server, uint32_t id) { return uint64_t{server} << 32 | id; }

size_t index_of(const Lane& lane) { return reinterpret_cast<size_t>(lane.owner); }

}  // namespace

PboxClient::PboxClient(Engine& engine, int rank, int cores)
    : engine_(engine), rank_(rank), cores_(static_cast<size_t>(cores)) {}

PboxClient::~PboxClient() {
  const auto guard = engine_.lock();
  remove_lanes();
}

void PboxClient::remove_lanes() {
  outbox_.clear();
  if (std::exchange(driven_, false)) engine_.async_end();
  for (Lane*& lane : lanes_) {
    if (!lane) continue;
    past_ += lane->counters;
    engine_.remove(*std::exchange(lane, nullptr));
  }
}

void PboxClient::attach(int core, std::unique_ptr<Lane> lane) {
  const auto guard = engine_.lock();
  const auto index = static_cast<size_t>(core);
  if (index >= lanes_.size()) {
    lanes_.resize(index + 1);
    outstanding_.resize(index + 1);
  }
  Lane& added = engine_.add(std::move(lane), *this);
  added.corked = true;  // `started` moves what was queued
  added.owner = reinterpret_cast<void*>(index);
  lanes_[index] = &added;
}

void PboxClient::add(TableInfo info, std::vector<std::shared_ptr<Memory>> answers,
                     std::vector<WireIds> servers) {
  info.check();
  if (servers.empty()) servers.push_back({info.first_key, info.first_chunk, 0});
  if (answers.size() != (info.shared_answers ? 2u : 0u))
    throw Error(ErrorCode::internal,
                "[pbox] expected two answer memories of a table that shares them");
  const auto guard = engine_.lock();
  throw_if_failed();
  for (const ChunkInfo& chunk : info.chunks)
    if (chunk.core >= lanes_.size() || !lanes_[chunk.core] ||
        server_of(chunk.core) >= servers.size())
      throw Error(ErrorCode::internal, "[pbox] no lane to core " + std::to_string(chunk.core));
  auto shard = std::make_unique<Shard>();
  shard->keys.resize(info.keys.size());
  shard->pending.resize(info.chunks.size());
  for (const ChunkInfo& chunk : info.chunks) {
    auto& cores = shard->keys[chunk.key].cores;
    if (std::find(cores.begin(), cores.end(), chunk.core) == cores.end())
      cores.push_back(chunk.core);
  }
  if (info.compression.packs()) shard->packer = std::make_shared<Packer>(info);
  shard->info = std::move(info);
  shard->answers = std::move(answers);
  for (size_t server = 0; server < servers.size(); ++server) {
    by_chunk_[on_server(server, servers[server].chunk)] = shard.get();
    by_key_[on_server(server, servers[server].key)] = shard.get();
  }
  shard->ids = std::move(servers);
  tables_[shard->info.id] = std::move(shard);
}

void PboxClient::drop(uint32_t table) {
  const auto guard = engine_.lock();
  const auto found = tables_.find(table);
  if (found == tables_.end()) return;
  found->second->dropped = true;
  if (!found->second->outstanding) forget(*found->second);
}

void PboxClient::forget(Shard& gone) {
  for (size_t server = 0; server < gone.ids.size(); ++server) {
    by_chunk_.erase(on_server(server, gone.ids[server].chunk));
    by_key_.erase(on_server(server, gone.ids[server].key));
  }
  const uint32_t id = gone.info.id;
  tables_.erase(id);
}

PboxClient::Shard& PboxClient::shard(uint32_t table) {
  const auto found = tables_.find(table);
  if (found == tables_.end() || found->second->dropped)
    throw Error(ErrorCode::config, "[pbox] table " + std::to_string(table) + " was closed");
  return *found->second;
}

PboxClient::Key& PboxClient::startable(Shard& shard, uint32_t key) {
  throw_if_failed();
  Key& state = shard.keys.at(key);
  if (state.outstanding)
    throw Error(ErrorCode::duplicate, "[pbox] rank " + std::to_string(rank_) + " started key " +
                                          std::to_string(key) + " again before its answer came");
  return state;
}

PboxClient::Place PboxClient::find(const Firsts& firsts, const Lane& lane, uint32_t id) const {
  const uint64_t wanted = on_server(server_of(index_of(lane)), id);
  auto found = firsts.upper_bound(wanted);
  if (found == firsts.begin()) return {nullptr, 0};
  --found;
  const uint64_t index = wanted - found->first;
  return {index > UINT32_MAX ? nullptr : found->second, static_cast<uint32_t>(index)};
}

PboxClient::Place PboxClient::chunk_at(const Lane& lane, uint32_t id) const {
  const Place found = find(by_chunk_, lane, id);
  if (!found.shard || found.index >= found.shard->pending.size())
    throw Error(ErrorCode::protocol, "[pbox] the server answered an unknown chunk");
  return found;
}

PboxClient::Place PboxClient::key_at(const Lane& lane, uint32_t id) const {
  const Place found = find(by_key_, lane, id);
  if (!found.shard || found.index >= found.shard->keys.size())
    throw Error(ErrorCode::protocol, "[pbox] the server answered an unknown key");
  return found;
}

void PboxClient::push(uint32_t table, uint32_t key, uint8_t flags, std::byte* memory) {
  auto guard = engine_.lock();
  startable(shard(table), key);
  if (const auto packer = shard(table).packer; packer && !(flags & (flag::no_grad | flag::init))) {
    guard.unlock();  // lanes go on moving meanwhile
    packer->pack(key, memory);
    guard = engine_.lock();
  }
  Shard& target = shard(table);
  Key& state = startable(target, key);
  if (!target.info.keys[key].chunks) return;  // no elements: nothing to exchange
  state.memory = memory;
  state.pulling = false;
  if (target.info.arena)
    send_key(target, key, flags);
  else
    send_chunks(target, key, FrameKind::push, flags);
  started(target);
}

void PboxClient::pull(uint32_t table, uint32_t key, std::byte* memory) {
  const auto guard = engine_.lock();
  Shard& target = shard(table);
  if (!target.info.server || target.info.shared)
    throw Error(ErrorCode::config,
                "[pbox] only keys with a server optimizer, of a model that is not shared, can be "
                "pulled alone");
  Key& state = startable(target, key);
  if (!target.info.keys[key].chunks) return;
  state.memory = memory;
  state.pulling = true;
  send_chunks(target, key, FrameKind::pull, 0);
  started(target);
}

void PboxClient::send_chunks(Shard& target, uint32_t key, FrameKind kind, uint8_t flags) {
  const TableInfo& info = target.info;
  const KeyInfo& range = info.keys[key];
  Key& state = target.keys[key];
  std::vector<Parcel> parcels;
  parcels.reserve(range.chunks);
  for (uint32_t index = range.first_chunk; index < range.first_chunk + range.chunks; ++index) {
    const ChunkInfo& chunk = info.chunks[index];
    const size_t length = kind == FrameKind::push ? push_bytes(info, chunk, flags) : 0;
    const Header header{kind,
                        flags,
                        static_cast<uint16_t>(rank_),
                        target.ids[server_of(chunk.core)].chunk + index,
                        state.step,
                        static_cast<uint32_t>(length)};
    expect(target, key, index);
    const std::byte* data = length ? content(target, index, flags) : nullptr;
    parcels.push_back({lanes_[chunk.core], header, data, &target, key});
  }
  const auto place = place_in_outbox(target, key);
  outbox_.insert(place, parcels.begin(), parcels.end());
  post();
}

// What a push of a chunk carries.
const std::byte* PboxClient::content(const Shard& target, uint32_t index, uint8_t flags) const {
  if (target.packer && !(flags & flag::init)) return target.packer->form(index);
  const ChunkInfo& chunk = target.info.chunks[index];
  return target.keys[chunk.key].memory + (chunk.offset - target.info.keys[chunk.key].offset);
}

// Where a key's chunks are put into the outbox. Those of other tables are not overtaken.
std::deque<PboxClient::Parcel>::iterator PboxClient::place_in_outbox(const Shard& target,
                                                                     uint32_t key) {
  auto place = outbox_.end();
  if (!target.info.first_keys_first) return place;
  const auto overtaken = [&](const Parcel& parcel) {
    return parcel.shard == &target && parcel.key > key;
  };
  while (place != outbox_.begin() && overtaken(*std::prev(place))) --place;
  return place;
}

// An answer to a chunk.
void PboxClient::expect(Shard& target, uint32_t key, uint32_t index) {
  const uint16_t core = target.info.chunks[index].core;
  ++target.pending[index];
  ++target.keys[key].outstanding;
  outstanding_[core] += answer_bytes(target, *lanes_[core], index);
}

void PboxClient::read_state(uint32_t table, uint32_t key, uint8_t array, std::byte* memory) {
  const auto guard = engine_.lock();
  Shard& target = shard(table);
  Key& state = startable(target, key);
  const TableInfo& info = target.info;
  const KeyInfo& range = info.keys[key];
  if (!range.chunks) return;
  state.memory = memory;
  state.pulling = true;
  const uint8_t parts = is_16bit(range.dtype) ? 2 : 1;
  for (uint32_t index = range.first_chunk; index < range.first_chunk + range.chunks; ++index)
    for (uint8_t part = 0; part < parts; ++part) {
      const Header header{FrameKind::state,
                          StatePart(array, part).flags(),
                          static_cast<uint16_t>(rank_),
                          target.ids[server_of(info.chunks[index].core)].chunk + index,
                          0,
                          0};
      expect(target, key, index);
      lanes_[info.chunks[index].core]->send(header, nullptr);
    }
  started(target);
}

uint32_t PboxClient::taken(uint32_t table, uint32_t key) {
  const auto guard = engine_.lock();
  return shard(table).keys.at(key).taken;
}

void PboxClient::write_state(uint32_t table, uint32_t key, uint8_t array, uint32_t taken,
                             const std::byte* memory) {
  const auto guard = engine_.lock();
  Shard& target = shard(table);
  startable(target, key);
  const TableInfo& info = target.info;
  const KeyInfo& range = info.keys[key];
  const uint8_t parts = is_16bit(range.dtype) ? 2 : 1;
  for (uint32_t index = range.first_chunk; index < range.first_chunk + range.chunks; ++index)
    for (uint8_t part = 0; part < parts; ++part) {
      const ChunkInfo& chunk = info.chunks[index];
      const Header header{FrameKind::state,
                          StatePart(array, part).flags(),
                          static_cast<uint16_t>(rank_),
                          target.ids[server_of(info.chunks[index].core)].chunk + index,
                          taken,
                          chunk.bytes};
      const size_t offset = parts * (chunk.offset - range.offset) + size_t{part} * chunk.bytes;
      lanes_[chunk.core]->send_copy(header, memory + offset);
    }
  engine_.progress_once();
  engine_.kick();
}

void PboxClient::post() {
  const size_t ahead = std::max(kLeastAheadBytes, kAheadBytes / std::max<size_t>(1, lanes_.size()));
  while (!outbox_.empty()) {
    const Parcel& next = outbox_.front();
    if (unsent_ > 0 && (unsent_ + 1) * next.header.length > ahead) return;
    next.lane->send(next.header, next.payload, &unsent_);
    outbox_.pop_front();
  }
}

void PboxClient::send_key(Shard& target, uint32_t key, uint8_t flags) {
  Key& state = target.keys[key];
  for (const uint16_t core : state.cores) {
    const Header header{FrameKind::push_key,
                        flags,
                        static_cast<uint16_t>(rank_),
                        target.ids[server_of(core)].key + key,
                        state.step,
                        0};
    ++state.outstanding;
    outstanding_[core] += lanes_[core]->footprint(0);
    lanes_[core]->send(header, nullptr);
  }
}

void PboxClient::started(Shard& target) {
  ++target.outstanding;
  ++outstanding_keys_;
  const auto queues = [](Lane* lane) { return lane && !lane->idle(); };
  bool queued = std::any_of(lanes_.begin(), lanes_.end(), queues);
  if (queued) {
    engine_.progress_once();
    queued = std::any_of(lanes_.begin(), lanes_.end(), queues);
  }
  const size_t to_come = std::accumulate(outstanding_.begin(), outstanding_.end(), size_t{0});
  if (!driven_ && outstanding_keys_ > 0 && (queued || to_come > kDriveBytes)) {
    driven_ = true;
    engine_.async_begin();
  }
  engine_.kick();
}

void PboxClient::set_hyper(uint32_t table, uint32_t group, const HyperWire& hyper) {
  const auto guard = engine_.lock();
  throw_if_failed();
  Header header{FrameKind::hyper, 0, static_cast<uint16_t>(rank_), 0, 0, sizeof hyper};
  const std::vector<WireIds>& ids = shard(table).ids;
  for (Lane* lane : lanes_) {
    if (!lane) continue;
    header.id = ids.at(server_of(index_of(*lane))).group + group;
    lane->send_copy(header, &hyper);
  }
  engine_.kick();
}

std::byte* PboxClient::destination(Lane& lane, const Header& header) {
  if (header.kind != FrameKind::result && header.kind != FrameKind::state) return nullptr;
  const auto [target, index] = chunk_at(lane, header.id);
  const ChunkInfo& chunk = target->info.chunks[index];
  if (!target->pending[index] || header.length != chunk.bytes)
    throw Error(ErrorCode::protocol,
                "[pbox] the server's answer does not fit chunk " + std::to_string(index));
  if (target->dropped) return nullptr;
  const KeyInfo& range = target->info.keys[chunk.key];
  std::byte* memory = target->keys[chunk.key].memory;
  if (header.kind == FrameKind::result) return memory + (chunk.offset - range.offset);
  const size_t wide = is_16bit(range.dtype) ? 2 : 1;
  return memory + wide * (chunk.offset - range.offset) +
         size_t{StatePart(header.flags).part} * chunk.bytes;
}

void PboxClient::frame(Lane& lane, const Header& header, const std::byte* payload) {
  if (header.kind == FrameKind::error) {
    if (!failed_) failed_ = unpack_error(payload, header.length);
    return engine_.completed();
  }
  if (header.kind == FrameKind::bye) return;
  if (header.kind != FrameKind::result && header.kind != FrameKind::state)
    throw Error(ErrorCode::protocol, "[pbox] unexpected frame from the server");
  if (header.kind == FrameKind::result && (header.flags & flag::arena)) {
    const auto [target, key] = key_at(lane, header.id);
    return answered(*target, lane, key, lane.footprint(0));
  }
  const auto [target, index] = chunk_at(lane, header.id);
  if (!header.length) copy_answer(*target, index, header);
  --target->pending[index];
  if (header.kind == FrameKind::state)
    target->keys[target->info.chunks[index].key].taken = header.step;
  answered(*target, lane, target->info.chunks[index].key, answer_bytes(*target, lane, index));
}

void PboxClient::copy_answer(Shard& target, uint32_t index, const Header& header) {
  const ChunkInfo& chunk = target.info.chunks[index];
  if (!target.pending[index] || !target.info.shared_answers || !(header.flags & flag::in_answer))
    throw Error(ErrorCode::protocol,
                "[pbox] the server's answer does not fit chunk " + std::to_string(index));
  if (target.dropped) return;
  const std::byte* answer = target.answers[header.step % 2]->data() + chunk.offset;
  const KeyInfo& range = target.info.keys[chunk.key];
  const Stores stores = range.bytes < kCachedBytes ? Stores::cached : Stores::streaming;
  copy(target.keys[chunk.key].memory + (chunk.offset - range.offset), answer, chunk.bytes,
       {best_isa(), stores});
}

size_t PboxClient::answer_bytes(const Shard& target, const Lane& lane, uint32_t index) const {
  return lane.footprint(target.info.shared_answers ? 0 : target.info.chunks[index].bytes);
}

void PboxClient::answered(Shard& target, Lane& lane, uint32_t key, size_t bytes) {
  Key& state = target.keys[key];
  if (!state.outstanding)
    throw Error(ErrorCode::protocol, "[pbox] the server answered a key twice");
  outstanding_[index_of(lane)] -= bytes;
  if (--state.outstanding) return;
  if (!state.pulling) ++state.step;
  if (--target.outstanding == 0 && target.dropped) forget(target);
  engine_.completed();
  if (--outstanding_keys_ == 0 && driven_) {
    driven_ = false;
    engine_.async_end();
  }
}

void PboxClient::closed(Lane& lane, const Error& why) {
  const size_t servers = cores_ ? lanes_.size() / cores_ : 1;
  const size_t server = server_of(index_of(lane));
  std::string name = "the PBox server";
  if (servers > 1) name = "shard " + std::to_string(server) + " of " + std::to_string(servers);
  // Which of several it is the rank tells, too: -2 - server (see PeerLost in errors.py).
  const int rank = servers > 1 ? -2 - static_cast<int>(server) : -1;
  if (!failed_ && !closing_)
    failed_ = Error(why.code, "[pbox] " + name + " was lost: " + why.what(), rank);
  engine_.completed();
}

void PboxClient::fail(const Error& error) {
  const auto guard = engine_.lock();
  if (!failed_) failed_ = error;
  engine_.completed();
  engine_.progress_once();
}

void PboxClient::close() {
  const auto guard = engine_.lock();
  closing_ = true;
  Header header{FrameKind::bye, 0, static_cast<uint16_t>(rank_), 0, 0, 0};
  std::vector<std::byte> cause;
  if (failed_) {
    header.kind = FrameKind::error;
    cause = pack_error(*failed_);
    header.length = static_cast<uint32_t>(cause.size());
  }
  for (Lane* lane : lanes_)
    if (lane && !lane->is_closed()) lane->send_copy(header, cause.data());
  engine_.progress_once();
  remove_lanes();
  if (!failed_)
    failed_ =
        Error(ErrorCode::config, "[pbox] rank " + std::to_string(rank_) + " has left the job");
  engine_.completed();
  engine_.progress_once();
}

void PboxClient::throw_if_failed() const {
  if (failed_) throw *failed_;
}

bool PboxClient::done(uint32_t table, uint32_t key) {
  const auto guard = engine_.lock();
  if (failed_ || !shard(table).keys.at(key).outstanding) return true;
  engine_.progress_once();
  return failed_ || !shard(table).keys.at(key).outstanding;
}

void PboxClient::set_expectations(const Shard& target, uint32_t key) {
  // Only when all that is under way is waited for is it known how much must come first.
  const bool all =
      target.outstanding == outstanding_keys_ && (key == kAllKeys || outstanding_keys_ == 1);
  for (size_t core = 0; core < lanes_.size(); ++core)
    if (lanes_[core])
      engine_.expect(*lanes_[core],
                     all ? std::clamp<size_t>(outstanding_[core], 1, kWakeBytes) : 1);
}

bool PboxClient::wait(uint32_t table, uint32_t key, double timeout_s) {
  bool is_answered = false;
  const auto finished = [&] {
    if (failed_ && !tables_.contains(table)) return true;
    Shard& target = shard(table);
    is_answered = key == kAllKeys ? !target.outstanding : !target.keys.at(key).outstanding;
    if (is_answered || failed_) return true;
    set_expectations(target, key);
    return false;
  };
  const bool finished_in_time = engine_.wait(finished, timeout_s);
  const auto guard = engine_.lock();
  if (!is_answered) throw_if_failed();  // an answer that came before the end is good
  return finished_in_time;
}

bool PboxClient::failed() {
  const auto guard = engine_.lock();
  return failed_.has_value();
}

LaneCounters PboxClient::counters() {
  const auto guard = engine_.lock();
  LaneCounters sum = past_;
  for (const Lane* lane : lanes_)
    if (lane) sum += lane->counters;
  return sum;
}

}  // namespace phub
