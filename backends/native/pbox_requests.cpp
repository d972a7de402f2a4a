// What a worker sends to its cores: pushes, pulls, the optimizer's state and hyperparameters.
#include <algorithm>
#include <numeric>

#include "pbox_client.h"

namespace phub {
namespace {

// With less than this to come, the answer waits in the lane for whoever waits for it; with more
// the background thread takes it in, so that the server is not held up.
constexpr size_t kDriveBytes = 256 << 10;

// Of chunks that lanes hold and could not send: so far one lane may run ahead of another. The more
// lanes there are the less each has, but with few of them a sender that seldom gets a processor,
// while the model computes, must not come to its turn in vain.
constexpr size_t kAheadBytes = 512 << 10, kLeastAheadBytes = 64 << 10;

}  // namespace

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

}  // namespace phub
