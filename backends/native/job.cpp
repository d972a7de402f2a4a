#include "job.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

#include "places.h"

namespace phub {
namespace {

constexpr size_t kMaxQueued = 256;  // frames in a lane, beside those of its chunks

[[noreturn]] void refuse(int rank, const std::string& what) {
  throw Error(ErrorCode::protocol, "[pbox] rank " + std::to_string(rank) + " sent " + what, rank);
}

std::string describe(const HyperWire& hyper) {
  std::ostringstream text;
  const bool adam = hyper.rule == HyperWire::adam;
  const auto option = [&](const char* name, uint32_t bit) {
    if (hyper.options & bit) text << " " << name;
  };
  text << (adam ? "adam" : "sgd") << " lr " << hyper.lr << " weight_decay " << hyper.weight_decay;
  if (adam)
    text << " beta1 " << hyper.beta1 << " beta2 " << hyper.beta2 << " eps " << hyper.eps;
  else
    text << " momentum " << hyper.momentum << " dampening " << hyper.dampening;
  option("maximize", HyperWire::maximize);
  option("nesterov", HyperWire::nesterov);
  option("amsgrad", HyperWire::amsgrad);
  option("decoupled", HyperWire::decoupled);
  return text.str();
}

Update to_update(const HyperWire& hyper) {
  const auto has = [&](uint32_t option) { return (hyper.options & option) != 0; };
  if (hyper.rule == HyperWire::adam)
    return AdamParams{hyper.lr,
                      hyper.beta1,
                      hyper.beta2,
                      hyper.eps,
                      hyper.weight_decay,
                      has(HyperWire::amsgrad),
                      has(HyperWire::decoupled),
                      has(HyperWire::maximize)};
  return SgdParams{hyper.lr,           hyper.momentum,           hyper.dampening,
                   hyper.weight_decay, has(HyperWire::nesterov), has(HyperWire::maximize)};
}

}  // namespace

JobShard::JobShard(uint32_t id, int workers, int core)
    : id(id), workers(workers), core_(core), lanes_(static_cast<size_t>(workers)) {}

void JobShard::attach(int rank, Lane& lane) {
  Lane*& place = lanes_.at(static_cast<size_t>(rank));
  if (place)
    throw Error(ErrorCode::config, "[pbox] rank " + std::to_string(rank) + " has a lane to core " +
                                       std::to_string(core_) + " already");
  place = &lane;
}

void JobShard::detach(Lane& lane) {
  std::replace(lanes_.begin(), lanes_.end(), &lane, static_cast<Lane*>(nullptr));
}

void JobShard::leave(int rank) {
  left_.set(static_cast<size_t>(rank));
  for (auto& [first_chunk, shard] : tables_) answer_allowed(*shard);
  if (!stalled().empty()) refuse_absent(rank);
}

void JobShard::refuse_absent(int rank) const {
  throw Error(
      ErrorCode::peer_lost,
      "[pbox] rank " + std::to_string(rank) +
          " has ended, but other ranks still exchange: its script returned early, or stopped "
          "with an error of its own (see its output); all ranks must make the same number "
          "of steps",
      rank);
}

void JobShard::add(std::shared_ptr<Table> table) {
  auto shard = std::make_unique<TableShard>();
  const TableInfo& info = table->info;
  shard->keys.resize(info.keys.size());
  shard->chunks.resize(info.chunks.size());
  for (uint32_t index = 0; index < info.chunks.size(); ++index)
    if (info.chunks[index].core == core_)
      shard->keys[info.chunks[index].key].chunks.push_back(index);
  chunks_ += info.chunks.size();
  const auto ranks = static_cast<size_t>(workers);
  if (info.server)
    for (const KeyInfo& key : info.keys)
      groups_[key.group] = {info.states, std::vector<std::optional<HyperWire>>(ranks)};
  if (info.staleness > 0) {
    for (KeyState& key : shard->keys) key.arrivals.steps.resize(ranks);
    for (ChunkState& chunk : shard->chunks) chunk.arrivals.steps.resize(ranks);
  }
  shard->table = std::move(table);
  by_key_[info.first_key] = shard.get();
  tables_[info.first_chunk] = std::move(shard);
}

void JobShard::drop(uint32_t table_id) {
  const auto found = find(table_id);
  if (found == tables_.end()) return;
  std::unique_ptr<TableShard> shard = std::move(found->second);
  const TableInfo& info = shard->table->info;
  std::erase_if(ready_, [&](const Place& place) { return place.shard == shard.get(); });
  by_key_.erase(info.first_key);
  tables_.erase(found);
  chunks_ -= info.chunks.size();
  if (info.server)
    for (const KeyInfo& key : info.keys) groups_.erase(key.group);
  if (shard->unsent > 0) retired_.push_back(std::move(shard));
}

void JobShard::forget_retired() {
  std::erase_if(retired_, [](const auto& shard) { return shard->unsent == 0; });
}

bool JobShard::end(uint32_t table_id, const Error& error) {
  const auto found = find(table_id);
  if (found == tables_.end()) return false;
  TableShard& shard = *found->second;
  shard.ended = error;
  const auto waits = [this](const auto& state) {
    return partial(state.arrivals) || state.arrivals.waiting.any();
  };
  return std::any_of(shard.keys.begin(), shard.keys.end(), waits) ||
         std::any_of(shard.chunks.begin(), shard.chunks.end(), waits);
}

JobShard::Tables::iterator JobShard::find(uint32_t table_id) {
  return std::find_if(tables_.begin(), tables_.end(),
                      [&](const auto& item) { return item.second->table->info.id == table_id; });
}

bool JobShard::partial(const Arrivals& arrivals) const {
  const bool together = arrivals.steps.empty() || arrivals.init;
  return together && arrivals.arrived.any() &&
         arrivals.arrived.count() < static_cast<size_t>(workers);
}

JobShard::Place JobShard::key_at(uint32_t id) {
  auto found = by_key_.upper_bound(id);
  if (found == by_key_.begin()) return {};
  --found;
  const uint32_t index = id - found->first;
  if (index >= found->second->keys.size()) return {};
  return {found->second, index, Place::kAll};
}

JobShard::Place JobShard::chunk_at(uint32_t id) {
  auto found = tables_.upper_bound(id);
  if (found == tables_.begin()) return {};
  --found;
  const uint32_t index = id - found->first;
  if (index >= found->second->chunks.size()) return {};
  return {found->second.get(), index, Place::kAll};
}

void JobShard::frame(int rank, const Header& header, const std::byte* payload) {
  if (failed_) return;  // what was under way when the job ended
  if (header.sender != rank) refuse(rank, "a frame as rank " + std::to_string(header.sender));
  switch (header.kind) {
    case FrameKind::push:
      return push(rank, header, payload);
    case FrameKind::push_key:
      return push_key(rank, header);
    case FrameKind::pull:
      return pull(rank, header);
    case FrameKind::state:
      return state(rank, header, payload);
    case FrameKind::hyper:
      return set_hyper(rank, header, payload);
    case FrameKind::error:
      return report(rank, header, payload);
    default:
      refuse(rank, "a frame of kind " + std::to_string(static_cast<int>(header.kind)) +
                       ", which a core does not take");
  }
}

Arrivals& JobShard::arrive(const TableShard& shard, Arrivals& arrivals, int rank,
                           const Header& header, const char* what) {
  if (shard.ended) throw *shard.ended;
  const std::string name = std::string(what) + " " + std::to_string(header.id);
  if (header.step != arrivals.finished(rank))
    refuse(rank, name + " of step " + std::to_string(header.step) + ", expected step " +
                     std::to_string(arrivals.finished(rank)));
  const auto bit = static_cast<size_t>(rank);
  if (arrivals.arrived.test(bit)) refuse(rank, name + " twice in one step");
  const bool init = header.flags & flag::init;
  if (arrivals.arrived.any() && init != arrivals.init)
    refuse(rank,
           name + (init ? " as initial weights" : " as a gradient") + ", other ranks did not");
  const bool gradient = !(header.flags & flag::no_grad);
  if (init && gradient && arrivals.with_gradient.any())
    refuse(rank, name + " as initial weights, which another rank sent too");
  const bool together = arrivals.steps.empty() || init;
  for (int other = 0; together && left_.any() && other < workers; ++other)
    if (left_.test(static_cast<size_t>(other))) refuse_absent(other);
  arrivals.init = init;
  arrivals.arrived.set(bit);
  if (gradient) arrivals.with_gradient.set(bit);
  return arrivals;
}

// A worker that ends because of an error says so, and the others learn the cause. That it has lost
// the server (rank -1) is not the cause: here the server is. Another shard has a rank below that.
void JobShard::report(int rank, const Header& header, const std::byte* payload) const {
  if (header.length < sizeof(ErrorWire)) refuse(rank, "a short error frame");
  const Error error = unpack_error(payload, header.length);
  if (error.code != ErrorCode::peer_lost || error.rank != -1) throw error;
  throw Error(error.code, "[pbox] rank " + std::to_string(rank) + " was lost: " + error.what(),
              rank);
}

bool JobShard::complete(const Arrivals& arrivals) const {
  if (arrivals.arrived.count() != static_cast<size_t>(workers)) return false;
  if (arrivals.init && arrivals.with_gradient.none())
    throw Error(ErrorCode::mismatch,
                "[pbox] expected initial weights from the root, but no rank sent any: "
                "all ranks must name the same root");
  return true;
}

void JobShard::push(int rank, const Header& header, const std::byte* payload) {
  const Place place = chunk_at(header.id);
  if (!place.shard) refuse(rank, "unknown chunk " + std::to_string(header.id));
  const TableInfo& info = place.shard->table->info;
  const ChunkInfo& chunk = info.chunks[place.index];
  if (chunk.core != core_)
    refuse(rank, "chunk " + std::to_string(header.id) + " to another chunk's core");
  if (info.arena) refuse(rank, "a chunk of a key whose gradients are read in place");
  const size_t expected = push_bytes(info, chunk, header.flags);
  if (header.length != expected)
    refuse(rank, "chunk " + std::to_string(header.id) + " with " + std::to_string(header.length) +
                     " bytes, expected " + std::to_string(expected));
  Arrivals& arrivals =
      arrive(*place.shard, place.shard->chunks[place.index].arrivals, rank, header, "chunk");
  const std::byte* gradient = expected ? payload : nullptr;
  if (info.staleness > 0 && !arrivals.init)
    return step_alone(*place.shard, place.index, rank, gradient);
  if (info.deterministic)
    fold_in_order(*place.shard, place.index, rank, gradient, expected);
  else if (gradient)
    fold(*place.shard, place.index, rank, gradient, arrivals.with_gradient.count() == 1);
  if (complete(arrivals)) answer_chunk(*place.shard, place.index);
}

void JobShard::push_key(int rank, const Header& header) {
  Place place = key_at(header.id);
  if (!place.shard) refuse(rank, "unknown key " + std::to_string(header.id));
  KeyState& key = place.shard->keys[place.index];
  if (!place.shard->table->info.arena || header.length || key.chunks.empty())
    refuse(rank, "key " + std::to_string(header.id) + " as if this core read it in place");
  const Arrivals& arrivals = arrive(*place.shard, key.arrivals, rank, header, "key");
  const bool alone = place.shard->table->info.staleness > 0 && !arrivals.init;
  if (alone) place.rank = rank;
  if (alone || complete(arrivals)) ready(place);
}

void JobShard::ready(const Place& place) {
  auto at = ready_.end();
  const auto overtakes = [&](const Place& other) {
    return other.shard == place.shard && other.index > place.index;
  };
  if (place.shard->table->info.first_keys_first)
    while (at != ready_.begin() && overtakes(*std::prev(at))) --at;
  ready_.insert(at, place);
}

void JobShard::pull(int rank, const Header& header) {
  const Place place = chunk_at(header.id);
  if (!place.shard) refuse(rank, "unknown chunk " + std::to_string(header.id));
  const TableInfo& info = place.shard->table->info;
  const ChunkInfo& chunk = info.chunks[place.index];
  if (!info.server || info.shared || chunk.core != core_ || header.length)
    refuse(rank, "a pull of chunk " + std::to_string(header.id) +
                     ", of which this core keeps no weights");
  const uint32_t step = place.shard->chunks[place.index].arrivals.finished(rank);
  send_weights(*place.shard, place.index, step, rank);
}

void JobShard::state(int rank, const Header& header, const std::byte* payload) {
  const Place place = chunk_at(header.id);
  if (!place.shard) refuse(rank, "state of unknown chunk " + std::to_string(header.id));
  const Table& table = *place.shard->table;
  const ChunkInfo& chunk = table.info.chunks[place.index];
  const StatePart which(header.flags);
  const int parts = is_16bit(table.info.keys[chunk.key].dtype) ? 2 : 1;
  const bool is_weights = which.array == 0;
  if (chunk.core != core_ || which.part >= parts || which.array > table.state.size() ||
      (is_weights && !table.master) || (header.length && header.length != chunk.bytes))
    refuse(rank, "state of chunk " + std::to_string(header.id) + ", array " +
                     std::to_string(which.array) + " part " + std::to_string(which.part) +
                     " with " + std::to_string(header.length) +
                     " bytes, which this core does not keep so");
  std::byte* array =
      wide_at(table, is_weights ? table.master : table.state[which.array - 1u], chunk);
  std::byte* at = array + size_t{which.part} * chunk.bytes;
  uint32_t& taken = place.shard->chunks[place.index].taken;
  if (header.length) {
    std::memcpy(at, payload, chunk.bytes);
    taken = header.step;
    return;
  }
  const Header answer{FrameKind::state, header.flags, 0, header.id, taken, chunk.bytes};
  lanes_[static_cast<size_t>(rank)]->send_copy(answer, at);
  check_reading(rank);
}

void JobShard::set_hyper(int rank, const Header& header, const std::byte* payload) {
  const auto found = groups_.find(header.id);
  if (header.length != sizeof(HyperWire) || found == groups_.end())
    refuse(rank, "hyperparameters of " + std::to_string(header.length) + " bytes for group " +
                     std::to_string(header.id) + ", which is of no key");
  HyperWire values;
  std::memcpy(&values, payload, sizeof values);
  Group& group = found->second;
  if (values.rule > HyperWire::adam)
    refuse(rank, "hyperparameters of an unknown rule, " + std::to_string(values.rule));
  const int states = state_arrays(to_update(values));
  if (static_cast<uint32_t>(states) > group.states)
    refuse(rank, "hyperparameters " + describe(values) + ", for which " + std::to_string(states) +
                     " arrays of state are needed; the keys were registered with " +
                     std::to_string(group.states));
  group.values[static_cast<size_t>(rank)] = values;
}

void JobShard::check_reading(int rank) const {
  // Whoever reads its lane has at most one answer to come for each chunk.
  const Lane* lane = lanes_[static_cast<size_t>(rank)];
  if (lane && lane->queued() > kMaxQueued + 2 * chunks_)
    refuse(rank, "more and more, and does not read its answers");
}

Update JobShard::agreed_update(uint32_t group) const {
  const Update update = update_of(group, 0);
  const auto& values = groups_.at(group).values;
  for (int rank = 1; rank < workers; ++rank) {
    update_of(group, rank);  // it has set them
    const HyperWire& mine = *values[static_cast<size_t>(rank)];
    if (std::memcmp(&mine, &*values[0], sizeof(HyperWire)) != 0)
      throw Error(ErrorCode::mismatch,
                  "[pbox] hyperparameters of group " + std::to_string(group) +
                      " differ: rank 0 has " + describe(*values[0]) + ", rank " +
                      std::to_string(rank) + " has " + describe(mine) +
                      "; give all ranks the same before the step's first push");
  }
  return update;
}

Update JobShard::update_of(uint32_t group, int rank) const {
  const auto& values = groups_.at(group).values[static_cast<size_t>(rank)];
  if (!values)
    throw Error(ErrorCode::mismatch, "[pbox] rank " + std::to_string(rank) +
                                         " has not set hyperparameters of group " +
                                         std::to_string(group));
  return to_update(*values);
}

void JobShard::fail(const Error& error) {
  if (failed_) return;
  failed_ = error;
  ready_.clear();
  const std::vector<std::byte> payload = pack_error(error);
  const Header header{FrameKind::error, 0, 0, 0, 0, static_cast<uint32_t>(payload.size())};
  for (Lane* lane : lanes_)
    if (lane && !lane->is_closed()) lane->send_copy(header, payload.data());
}

std::vector<Stalled> JobShard::stalled() const {
  constexpr size_t kReported = 8;
  std::vector<Stalled> found;
  const auto look = [&](const Arrivals& arrivals, uint32_t key) {
    const RankSet& there = arrivals.waiting.any() ? arrivals.waiting : arrivals.arrived;
    if ((!partial(arrivals) && arrivals.waiting.none()) || found.size() >= kReported) return;
    if (!found.empty() && found.back().key == key) return;
    Stalled entry{key, {}};
    for (int rank = 0; rank < workers; ++rank)
      if (!there.test(static_cast<size_t>(rank))) entry.missing.push_back(rank);
    found.push_back(std::move(entry));
  };
  for (const auto& [first_chunk, shard] : tables_) {
    const TableInfo& info = shard->table->info;
    for (uint32_t key = 0; key < shard->keys.size(); ++key)
      look(shard->keys[key].arrivals, info.first_key + key);
    for (uint32_t chunk = 0; chunk < shard->chunks.size(); ++chunk)
      look(shard->chunks[chunk].arrivals, info.first_key + info.chunks[chunk].key);
  }
  return found;
}

}  // namespace phub
