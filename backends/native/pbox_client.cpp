#include "pbox_client.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu.h"

namespace phub {
namespace {

// A sleeping waiter is woken at the latest when so much has arrived, to overlap copying.
constexpr size_t kWakeBytes = 128 << 10;

// The results of a larger tensor would have left the cache before anybody reads them.
constexpr size_t kCachedBytes = 8 << 20;

uint64_t on_server(size_t server, uint32_t id) { return uint64_t{server} << 32 | id; }

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
