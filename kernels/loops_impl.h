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

  // The line of array k that starts at element i.
  template <class E, size_t lanes>
  PHUB_HD Line<typename E::Acc, lanes> line(int k, size_t i) const {
    const char* from = array[k] + i * sizeof(typename E::Wire);
    prefetch<lanes * sizeof(typename E::Wire)>(from);
    return load<E, lanes>(from);
  }
};

// Calls body(N) with n as a constant. Fewer instructions per line let the processor look further
// ahead, which is worth a tenth of the time with 8 arrays. For the most frequent loops only: sums of
// fp32 and fp64.
template <bool constant, class Body>
PHUB_HD void with_number(int n, const Body& body) {
  if constexpr (!constant) return body(n);
  switch (n) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    case 7: return body(std::integral_constant<int, 7>());
    case 8: return body(std::integral_constant<int, 8>());
  }
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
PHUB_HD Line<typename E::Acc, lanes> reduce_line(const Sources<N>& in, size_t i) {
  auto result = in.template line<E, lanes>(0, i);
  for (int k = 1; k < in.n; ++k) combine<Op>(result, in.template line<E, lanes>(k, i));
  return result;
}

template <class E, size_t lanes>
PHUB_HD void store_all(const Targets& out, size_t i, const Line<typename E::Acc, lanes>& line) {
#pragma GCC unroll 1
  for (int o = 0; o < out.n; ++o)
    store<E, lanes>(static_cast<char*>(out.array[o]) + i * sizeof(typename E::Wire), out.streaming[o], line);
}

template <class E, class Op>
void accumulate(void* acc, const void* const* in, int n, size_t lines, bool first, double pre) {
  using Acc = typename E::Acc;
  constexpr size_t lanes = kLanes<E>;
  const Sources<int> sources(in, n);
  for (size_t i = 0; i < lines * lanes; i += lanes) {
    char* const at = static_cast<char*>(acc) + i * sizeof(Acc);
    auto result = sources.template line<E, lanes>(0, i);
    scale_line(result, Acc(pre));
    if (!first) {
      auto before = load<Plain<Acc>, lanes>(at);
      combine<Op>(before, result);
      result = before;
    }
    for (int k = 1; k < sources.n; ++k) {
      auto next = sources.template line<E, lanes>(k, i);
      scale_line(next, Acc(pre));
      combine<Op>(result, next);
    }
    store<Plain<Acc>, lanes>(at, false, result);
  }
}

// From arrays of In to arrays of Out.
template <class In, class Out, class Op>
void reduce(const Targets& targets, const void* const* in, int n, size_t lines, double post) {
  using Acc = typename In::Acc;
  constexpr bool frequent = std::is_same_v<Op, Sum> && std::is_floating_point_v<typename In::Wire>;
  constexpr size_t lanes = kLanes<Out>;
  const Targets out = targets;
  with_number<frequent>(n, [&]<class N>(N number) {
    const Sources<N> sources(in, number);
    for (size_t i = 0; i < lines * lanes; i += lanes) {
      auto result = reduce_line<In, Op, lanes>(sources, i);
      scale_line(result, Acc(post));
      store_all<Out>(out, i, result);
    }
  });
  finish_streaming();
}

template <bool with_momentum, class Acc, size_t lanes>
PHUB_HD Line<Acc, lanes> step_line(const SgdRule<Acc>& rule, const Line<Acc, lanes>& gradient,
                                   const char* weights_at, [[maybe_unused]] char* momentum_at) {
  prefetch<lanes * sizeof(Acc)>(weights_at);
  auto weights = load<Plain<Acc>, lanes>(weights_at);
  if constexpr (with_momentum) {
    prefetch<lanes * sizeof(Acc)>(momentum_at);
    auto momentum = load<Plain<Acc>, lanes>(momentum_at);
    for (size_t p = 0; p < weights.parts; ++p)
      weights.part[p] = rule.step(weights.part[p], gradient.part[p], momentum.part[p]);
    store<Plain<Acc>, lanes>(momentum_at, false, momentum);
  } else {
    for (size_t p = 0; p < weights.parts; ++p) weights.part[p] = rule.step(weights.part[p], gradient.part[p]);
  }
  return weights;
}

// Gradients in arrays of In, a model on the wire as Out.
template <class In, class Out, bool with_momentum>
void step(const StepPass& pass, const Targets& targets, const void* const* in, int n, size_t lines) {
  using Acc = typename In::Acc;
  constexpr size_t lanes = kLanes<Out>;
  const SgdRule<Acc> rule(pass.params, pass.first);
  const Acc scale(pass.scale);
  const char* const weights_in = static_cast<const char*>(pass.weights_in);
  char* const weights_out = static_cast<char*>(pass.weights_out);
  char* const momentum = static_cast<char*>(pass.momentum);
  const Targets out = targets;
  with_number<std::is_floating_point_v<typename In::Wire>>(n, [&]<class N>(N number) {
    const Sources<N> sources(in, number);
    for (size_t i = 0; i < lines * lanes; i += lanes) {
      const size_t at = i * sizeof(Acc);
      auto gradient = reduce_line<In, Sum, lanes>(sources, i);
      scale_line(gradient, scale);
      char* const momentum_at = with_momentum ? momentum + at : nullptr;
      const auto weights = step_line<with_momentum>(rule, gradient, weights_in + at, momentum_at);
      if (weights_out) store<Plain<Acc>, lanes>(weights_out + at, false, weights);
      store_all<Out>(out, i, weights);
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
  const int row = static_cast<int>(t);
  table.step[row][0] = step<E, E, false>;
  table.step[row][1] = step<E, E, true>;
  table.step_acc[row][0] = step<AccElement, E, false>;
  table.step_acc[row][1] = step<AccElement, E, true>;
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
