#include "server.h"

#include <algorithm>

namespace phub {

Server::Server(int cores, int spin_us) {
  for (int index = 0; index < cores; ++index)
    cores_.push_back(std::make_unique<Core>(index, events_, spin_us));
}

void Server::add_job(uint32_t id, int workers) {
  if (workers < 1 || workers > kMaxWorkers)
    throw Error(ErrorCode::config, "[pbox] a job has 1 to " + std::to_string(kMaxWorkers) +
                                       " workers, got " + std::to_string(workers));
  for (auto& core : cores_) core->call([&](Core& c) { c.add_job(id, workers); });
}

std::shared_ptr<Table> Server::add_table(uint32_t job, TableInfo info, int workers) {
  const auto table = std::make_shared<Table>(std::move(info), workers);
  for (auto& core : cores_) core->call([&](Core& c) { c.job(job).add(table); });
  return table;
}

void Server::drop_table(uint32_t job, uint32_t table) {
  for (auto& core : cores_) core->call([&](Core& c) { c.job(job).drop(table); });
}

void Server::end_table(uint32_t job, uint32_t table, const Error& error) {
  for (auto& core : cores_)
    core->call([&](Core& c) {
      JobShard& shard = c.job(job);
      if (shard.end(table, error)) c.fail_job(shard, error);
    });
}

void Server::attach(uint32_t job, int rank, int core, std::unique_ptr<Lane> lane) {
  cores_.at(static_cast<size_t>(core))->call([&](Core& c) {
    c.attach(job, rank, std::move(lane));
  });
}

void Server::fail_job(uint32_t job, const Error& error) {
  for (auto& core : cores_)
    core->call([&](Core& c) {
      try {
        c.job(job).fail(error);
      } catch (const Error&) {  // it has ended meanwhile
      }
    });
}

void Server::drop_job(uint32_t job) {
  for (auto& core : cores_) core->call([&](Core& c) { c.drop_job(job); });
}

std::vector<Stalled> Server::stalled(uint32_t job) {
  std::vector<Stalled> all;
  for (auto& core : cores_)
    core->call([&](Core& c) {
      for (auto& entry : c.job(job).stalled()) {
        const auto same = [&](const Stalled& other) { return other.key == entry.key; };
        if (std::none_of(all.begin(), all.end(), same)) all.push_back(std::move(entry));
      }
    });
  return all;
}

uint64_t Server::chunks_answered(uint32_t job) {
  uint64_t sum = 0;
  for (auto& core : cores_) core->call([&](Core& c) { sum += c.job(job).chunks_answered(); });
  return sum;
}

}  // namespace phub
