// Which instruction set's loops run on this machine.
#include <array>

#include "kernels/passes.h"

namespace phub {
namespace {

const Loops* find_loops(Isa isa) {
  if (isa == Isa::baseline) return loops_baseline();
#if defined(__x86_64__)
  const bool has_half = __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2 && has_half && __builtin_cpu_supports("avx2")) return loops_avx2();
  if (isa == Isa::avx512 && has_half && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return loops_avx512();
#endif
  return nullptr;
}

const Loops* loops_or_null(Isa isa) {
  static const std::array<const Loops*, 3> tables = {
      find_loops(Isa::baseline), find_loops(Isa::avx2), find_loops(Isa::avx512)};
  return tables.at(static_cast<size_t>(isa));
}

}  // namespace

bool has_isa(Isa isa) { return loops_or_null(isa) != nullptr; }

Isa best_isa() {
  if (has_isa(Isa::avx512)) return Isa::avx512;
  return has_isa(Isa::avx2) ? Isa::avx2 : Isa::baseline;
}

const Loops& loops_of(const Execution& execution) {
  const Loops* found = loops_or_null(execution.isa);
  if (!found) refuse("loops", "an instruction set that this machine has (has_isa)");
  return *found;
}

void refuse(const std::string& function, const std::string& expected_and_got) {
  throw std::invalid_argument("[kernels] " + function + ": expected " + expected_and_got);
}

}  // namespace phub
