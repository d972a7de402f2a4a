#include "kernels/bench.h"

#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "kernels/passes.h"

// The streamed copy is written with the lines of the kernels.
#define PHUB_ISA walks
#define PHUB_VECTOR_BYTES 16
#include "kernels/elements.h"

namespace phub {
namespace {

using Floats = walks::Vector<float>;

// A value that depends on everything read, kept in a place that the compiler must write.
void read_all(const void* in, size_t bytes) {
  constexpr size_t kWays = 8;
  Floats sums[kWays] = {};
  const char* at = static_cast<const char*>(in);
  for (const char* end = at + bytes; at < end; at += sizeof sums)
    for (size_t w = 0; w < kWays; ++w) {
      Floats next;
      std::memcpy(&next, at + w * sizeof next, sizeof next);
      sums[w] += next;
    }
  [[maybe_unused]] volatile float kept = 0;
  for (const Floats& sum : sums) kept = sum[0] + sum[1] + sum[2] + sum[3];
}

void triad(void* out, const void* in0, const void* in1, size_t bytes) {
  char* to = static_cast<char*>(out);
  const char *a = static_cast<const char*>(in0), *b = static_cast<const char*>(in1);
  for (size_t i = 0; i < bytes; i += sizeof(Floats)) {
    Floats x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    x += 3.0f * y;
    std::memcpy(to + i, &x, sizeof x);
  }
}

// Does the chunk that starts `offset` bytes into the arrays.
void do_chunk(Walk what, DType t, const WalkArrays& arrays, size_t offset, size_t bytes,
              Stores stores) {
  const Inputs inputs{arrays.in.data(), static_cast<int>(arrays.in.size()), 1};
  const View view(inputs, 0, offset);
  const size_t count = bytes / item_size(t);
  const Scale average{1.0, 1.0 / view.n, 1};
  const Execution execution{best_isa(), stores};
  void* out = arrays.out ? advance(arrays.out, offset) : nullptr;
  switch (what) {
    case Walk::read:
      return read_all(view.array[0], bytes);
    case Walk::copy:
      return copy(out, view.array[0], bytes, execution);
    case Walk::triad:
      return triad(out, view.array[0], view.array[1], bytes);
    case Walk::reduce:
      return reduce(t, ReduceOp::sum, &out, 1, view.array, view.n, count, average, execution);
    case Walk::sgd:
    case Walk::adam: {
      const Update update = what == Walk::sgd ? Update(kWalkSgd) : Update(kWalkAdam);
      StepArrays step{advance(arrays.weights, offset), out, {}, nullptr, 0};
      for (size_t s = 0; s < arrays.state.size(); ++s)
        step.state[s] = advance(arrays.state[s], offset);
      return reduce_step(t, update, step, view.array, view.n, count, average, kWalkTaken,
                         execution);
    }
  }
}

struct Range {
  size_t offset, bytes;
};

// The chunks of each thread: neighbours, so that all have as many bytes as can be.
std::vector<std::vector<Range>> chunks_of(const std::vector<size_t>& keys, const Steps& steps) {
  const size_t total = std::accumulate(keys.begin(), keys.end(), size_t{0});
  const auto threads = static_cast<size_t>(steps.threads);
  std::vector<std::vector<Range>> chunks(threads);
  size_t begin = 0;
  for (const size_t bytes : keys) {
    for (size_t at = 0; at < bytes; at += steps.chunk_bytes) {
      const size_t middle = begin + at + std::min(steps.chunk_bytes, bytes - at) / 2;
      chunks[std::min(threads - 1, middle * threads / total)].push_back(
          {begin + at, std::min(steps.chunk_bytes, bytes - at)});
    }
    begin += bytes;
  }
  return chunks;
}

// A thread's part of a range, in whole lines of 64 bytes.
Range part_of(const Range& range, size_t thread, size_t threads) {
  const size_t lines = (range.bytes + 63) / 64;
  const size_t begin = std::min(range.bytes, thread * lines / threads * 64);
  const size_t end = std::min(range.bytes, (thread + 1) * lines / threads * 64);
  return {range.offset + begin, end - begin};
}

// The wide way, on one thread's part of a key; `meet` waits for the others.
template <class Meet>
void do_wide(DType t, const WalkArrays& arrays, void* merged, const Range& part, Stores stores,
             const Meet& meet) {
  const Inputs inputs{arrays.in.data(), static_cast<int>(arrays.in.size()), 1};
  const View view(inputs, 0, part.offset);
  const size_t count = part.bytes / item_size(t);
  const Execution execution{best_isa(), stores};
  void* const sum = advance(merged, part.offset);
  reduce(t, ReduceOp::sum, &sum, 1, view.array, view.n, count, {}, execution);
  meet();
  void* const out = advance(arrays.out, part.offset);
  StepArrays step_arrays{advance(arrays.weights, part.offset), out, {}, nullptr, 0};
  step_arrays.state[0] = advance(arrays.state[0], part.offset);
  step(t, kWalkSgd, step_arrays, sum, count, {1.0, 1.0 / view.n, 1}, kWalkTaken, execution);
  meet();
}

}  // namespace

std::vector<double> aggregate(Way way, DType t, const WalkArrays& arrays, void* merged,
                              const std::vector<size_t>& keys, const Steps& steps, Stores stores,
                              int rounds) {
  using Clock = std::chrono::steady_clock;
  const auto threads = static_cast<size_t>(steps.threads);
  const auto chunks = chunks_of(keys, steps);
  std::barrier meeting(steps.threads);
  const auto meet = [&] { meeting.arrive_and_wait(); };
  std::vector<double> seconds;
  const auto round = [&](size_t thread) {
    if (way == Way::tall) {
      for (const Range& chunk : chunks[thread])
        do_chunk(Walk::sgd, t, arrays, chunk.offset, chunk.bytes, stores);
      return meet();
    }
    size_t offset = 0;
    for (const size_t bytes : keys) {
      do_wide(t, arrays, merged, part_of({offset, bytes}, thread, threads), stores, meet);
      offset += bytes;
    }
  };
  const auto part = [&](size_t thread) {
    meet();
    for (int r = 0; r < rounds; ++r) {
      const auto begin = Clock::now();
      round(thread);
      if (thread == 0)
        seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  std::vector<std::jthread> others;
  for (size_t thread = 1; thread < threads; ++thread) others.emplace_back(part, thread);
  part(0);
  others.clear();  // joins
  return seconds;
}

std::vector<std::vector<double>> walk(Walk what, DType t, const WalkArrays& arrays,
                                      const Steps& steps, Stores stores) {
  using Clock = std::chrono::steady_clock;
  const auto threads = static_cast<size_t>(steps.threads);
  const size_t slice_bytes = steps.slice * steps.chunk_bytes;
  const size_t slices = arrays.bytes / slice_bytes / threads;  // of each thread
  std::vector<std::vector<double>> seconds(threads);
  std::barrier start(steps.threads);
  const auto part = [&](size_t thread) {
    seconds[thread].reserve(slices);
    start.arrive_and_wait();
    for (size_t s = thread * slices; s < (thread + 1) * slices; ++s) {
      const auto begin = Clock::now();
      for (size_t c = 0; c < steps.slice; ++c)
        do_chunk(what, t, arrays, s * slice_bytes + c * steps.chunk_bytes, steps.chunk_bytes,
                 stores);
      seconds[thread].push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  std::vector<std::jthread> others;
  for (size_t thread = 1; thread < threads; ++thread) others.emplace_back(part, thread);
  part(0);
  others.clear();  // joins
  return seconds;
}

}  // namespace phub
