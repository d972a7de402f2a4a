// The loops over arrays, and the table of them. Included as kernels/line.h is.
#pragma once

#include <type_traits>

#include "kernels/elements.h"
#include "kernels/loops.h"

namespace phub::PHUB_ISA {
namespace {

// The arrays that a pass reads. N: an integral_constant where their number is compiled in, else int.
template <class N>
struct Sources {
  const char* array[kStreams];
  N n;

  PHUB_HD Sources(const void* const* in, N n) : n(n) {
    for (int k = 0; k < n; ++k) array[k] = static_cast<const char*>(in[k]);
  }
};

// The arrays that a pass writes: one, mostly.
struct OneTarget {
  char* array;
  template <class E, size_t lanes>
  PHUB_HD void put(size_t offset, const Line<typename E::Acc, lanes>& line) const {
    store<E, lanes>(array + offset, false, line);
  }
};

struct OneStreamedTarget {
  char* array;
  template <class E, size_t lanes>
  PHUB_HD void put(size_t offset, const Line<typename E::Acc, lanes>& line) const {
    store<E, lanes>(array + offset, true, line);
  }
};

struct AnyTargets {
  Targets out;
  template <class E, size_t lanes>
  PHUB_HD void put(size_t offset, const Line<typename E::Acc, lanes>& line) const {
#pragma GCC unroll 1
    for (int o = 0; o < out.n; ++o)
      store<E, lanes>(static_cast<char*>(out.array[o]) + offset, out.streaming[o], line);
  }
};

// Calls body(sources, targets) in the form that takes the fewest instructions per line: with that
// the processor looks further ahead, which is worth a tenth of the time with 8 arrays. `frequent`:
// worth a loop of its own for each number of arrays.
template <bool frequent, class Body>
PHUB_HD void specialise(const void* const* in, int n, const Targets& out, const Body& body) {
  const auto with_targets = [&](auto targets) __attribute__((always_inline)) {
    const auto with_number = [&]<int number>(std::integral_constant<int, number> constant) {
      body(Sources(in, constant), targets);
    };
    if constexpr (frequent) {
      switch (n) {
        case 1: return with_number(std::integral_constant<int, 1>());
        case 2: return with_number(std::integral_constant<int, 2>());
        case 3: return with_number(std::integral_constant<int, 3>());
        case 4: return with_number(std::integral_constant<int, 4>());
        case 5: return with_number(std::integral_constant<int, 5>());
        case 6: return with_number(std::integral_constant<int, 6>());
        case 7: return with_number(std::integral_constant<int, 7>());
        case 8: return with_number(std::integral_constant<int, 8>());
      }
    }
    body(Sources(in, n), targets);
  };
  char* const array = static_cast<char*>(out.array[0]);
  if (out.n != 1) body(Sources(in, n), AnyTargets{out});
  else if (out.streaming[0]) with_targets(OneStreamedTarget{array});
  else with_targets(OneTarget{array});
}

template <class Op, class T, size_t lanes>
PHUB_HD void combine(Line<T, lanes>& into, const Line<T, lanes>& line) {
  for (size_t p = 0; p < line.parts; ++p) into.part[p] = Op::combine(into.part[p], line.part[p]);
}

// Multiplies by a factor; by one it changes nothing. Integers are not scaled.
template <class T, size_t lanes>
PHUB_HD void scale_line(Line<T, lanes>& line, [[maybe_unused]] T factor) {
  if constexpr (std::is_floating_point_v<T>)
    for (size_t p = 0; p < line.parts; ++p) line.part[p] *= factor;
}

template <class E, class Op, size_t lanes, class N>
PHUB_HD Line<typename E::Acc, lanes> reduce_line(const Sources<N>& in, size_t offset) {
  const auto line = [&](int k) {
    prefetch<lanes * sizeof(typename E::Wire)>(in.array[k] + offset);
    return load<E, lanes>(in.array[k] + offset);
  };
  auto result = line(0);
  if constexpr (std::is_same_v<N, int>) {
#pragma GCC unroll 1
    for (int k = 1; k < in.n; ++k) combine<Op>(result, line(k));
  } else {
    for (int k = 1; k < in.n; ++k) combine<Op>(result, line(k));
  }
  return result;
}

// Offsets below are in bytes of the wire's type; an array of wider elements has `wide` times as many.
template <class E>
inline constexpr size_t kWide = sizeof(typename E::Acc) / sizeof(typename E::Wire);

template <class In, class Out>
inline constexpr bool is_plain_float = std::is_same_v<In, Out>&& std::is_floating_point_v<typename In::Wire>;

template <class E, class Op>
void accumulate(void* acc, const void* const* in, int n, size_t lines, bool first, double pre) {
  using Acc = typename E::Acc;
  constexpr size_t lanes = kLanes<E>;
  const Sources sources(in, n);
  for (size_t offset = 0; offset < lines * kLineBytes; offset += kLineBytes) {
    char* const at = static_cast<char*>(acc) + offset * kWide<E>;
    Line<Acc, lanes> result;
    if (!first) result = load<Plain<Acc>, lanes>(at);
#pragma GCC unroll 1
    for (int k = 0; k < n; ++k) {
      auto next = load<E, lanes>(sources.array[k] + offset);
      prefetch<kLineBytes>(sources.array[k] + offset);
      scale_line(next, Acc(pre));
      if (k == 0 && first) result = next;
      else combine<Op>(result, next);
    }
    store<Plain<Acc>, lanes>(at, false, result);
  }
}

// From arrays of In to arrays of Out, the type on the wire.
template <class In, class Out, class Op>
void reduce(const Targets& out, const void* const* in, int n, size_t lines, double post) {
  using Acc = typename In::Acc;
  constexpr bool frequent = std::is_same_v<Op, Sum> && is_plain_float<In, Out>;
  constexpr size_t lanes = kLanes<Out>, wide = sizeof(typename In::Wire) / sizeof(typename Out::Wire);
  specialise<frequent>(in, n, out, [=](const auto& sources, const auto& targets) {
    for (size_t offset = 0; offset < lines * kLineBytes; offset += kLineBytes) {
      auto result = reduce_line<In, Op, lanes>(sources, offset * wide);
      scale_line(result, Acc(post));
      targets.template put<Out, lanes>(offset, result);
    }
  });
  finish_streaming();
}

template <Momentum kind, class Acc, size_t lanes>
PHUB_HD Line<Acc, lanes> step_line(const SgdRule<Acc>& rule, const Line<Acc, lanes>& gradient,
                                   const char* weights_at, [[maybe_unused]] char* momentum_at) {
  constexpr size_t bytes = lanes * sizeof(Acc);
  auto weights = load<Plain<Acc>, lanes>(weights_at);
  prefetch<bytes>(weights_at);
  if constexpr (kind == Momentum::none) {
    for (size_t p = 0; p < weights.parts; ++p) weights.part[p] = rule.step(weights.part[p], gradient.part[p]);
  } else {
    Line<Acc, lanes> momentum;
    if constexpr (kind == Momentum::steady) momentum = load<Plain<Acc>, lanes>(momentum_at);
    prefetch<bytes>(momentum_at);
    for (size_t p = 0; p < weights.parts; ++p) {
      if constexpr (kind == Momentum::steady)
        weights.part[p] = rule.step(weights.part[p], gradient.part[p], momentum.part[p]);
      else
        weights.part[p] = rule.first_step(weights.part[p], gradient.part[p], momentum.part[p]);
    }
    store<Plain<Acc>, lanes>(momentum_at, false, momentum);
  }
  return weights;
}

// Gradients in arrays of In, a model on the wire as Out.
template <class In, class Out, Momentum kind>
void step(const StepPass& pass, const Targets& out, const void* const* in, int n, size_t lines) {
  using Acc = typename In::Acc;
  constexpr bool frequent = kind == Momentum::steady && is_plain_float<In, Out>;
  constexpr size_t lanes = kLanes<Out>, wide = sizeof(typename In::Wire) / sizeof(typename Out::Wire);
  const SgdRule<Acc> rule(pass.params, pass.scale);
  const char* const weights_in = static_cast<const char*>(pass.weights_in);
  char* const weights_out = static_cast<char*>(pass.weights_out);
  char* const momentum = static_cast<char*>(pass.momentum);
  specialise<frequent>(in, n, out, [=](const auto& sources, const auto& targets) {
    for (size_t offset = 0; offset < lines * kLineBytes; offset += kLineBytes) {
      const auto gradient = reduce_line<In, Sum, lanes>(sources, offset * wide);
      const size_t at = offset * kWide<Out>;
      char* const momentum_at = kind == Momentum::none ? nullptr : momentum + at;
      const auto weights = step_line<kind>(rule, gradient, weights_in + at, momentum_at);
      if constexpr (kWide<Out> > 1) store<Plain<Acc>, lanes>(weights_out + at, false, weights);
      targets.template put<Out, lanes>(offset, weights);
    }
  });
  finish_streaming();
}

template <class E, class Op>
constexpr void fill_op(Loops& table, DType t, int op) {
  table.accumulate[static_cast<int>(t)][op] = accumulate<E, Op>;
  table.reduce[static_cast<int>(t)][op] = reduce<E, E, Op>;
}

// `Wrapping` is E, or its unsigned counterpart, whose sums and products have the same bits.
template <class E, class Wrapping = E>
constexpr void fill(Loops& table, DType t) {
  fill_op<Wrapping, Sum>(table, t, 0);
  fill_op<E, Min>(table, t, 1);
  fill_op<E, Max>(table, t, 2);
  fill_op<Wrapping, Product>(table, t, 3);
  table.narrow[static_cast<int>(t)] = reduce<Plain<typename E::Acc>, E, Sum>;
}

constexpr void fill_bool(Loops& table) {
  fill_op<Bool, Or>(table, DType::b8, 0);
  fill_op<Bool, And>(table, DType::b8, 1);
  fill_op<Bool, Or>(table, DType::b8, 2);
  fill_op<Bool, And>(table, DType::b8, 3);
  table.narrow[static_cast<int>(DType::b8)] = reduce<Bool, Bool, Or>;
}

template <class E>
constexpr void fill_step(Loops& table, DType t) {
  using AccElement = Plain<typename E::Acc>;
  const auto fill_kind = [&]<Momentum kind>() {
    table.step[static_cast<int>(t)][static_cast<int>(kind)] = step<E, E, kind>;
    table.step_acc[static_cast<int>(t)][static_cast<int>(kind)] = step<AccElement, E, kind>;
  };
  fill_kind.template operator()<Momentum::none>();
  fill_kind.template operator()<Momentum::first>();
  fill_kind.template operator()<Momentum::steady>();
}

constexpr Loops make_loops() {
  Loops table{};
  fill<Plain<float>>(table, DType::f32);
  fill<Plain<double>>(table, DType::f64);
  fill<Half>(table, DType::f16);
  fill<Brain>(table, DType::bf16);
  fill<Plain<int32_t>, Plain<uint32_t>>(table, DType::i32);
  fill<Plain<int64_t>, Plain<uint64_t>>(table, DType::i64);
  fill<Plain<uint8_t>>(table, DType::u8);
  fill<Plain<int8_t>, Plain<uint8_t>>(table, DType::i8);
  fill_bool(table);
  fill_step<Plain<float>>(table, DType::f32);
  fill_step<Plain<double>>(table, DType::f64);
  fill_step<Half>(table, DType::f16);
  fill_step<Brain>(table, DType::bf16);
  return table;
}

constexpr Loops kLoops = make_loops();

}  // namespace
}  // namespace phub::PHUB_ISA
