// The loops over arrays, and the table of them. Included as kernels/line.h is.
#pragma once

#include <type_traits>

#include "kernels/elements.h"
#include "kernels/loops.h"

namespace phub::PHUB_ISA {
namespace {

// The arrays that a pass reads. N: an integral_constant where their number is compiled in, or int.
template <class N>
struct Sources {
  const char* array[kStreams];
  N n;

  PHUB_HD Sources(const void* const* in, N n) : n(n) {
    for (int k = 0; k < n; ++k) array[k] = static_cast<const char*>(in[k]);
  }
};

// The arrays that a pass writes.
struct AnyTargets {
  Targets out;
  template <class E, size_t lanes>
  PHUB_HD void put(size_t offset, const Line<typename E::Acc, lanes>& line) const {
#pragma GCC unroll 1
    for (int o = 0; o < out.n; ++o)
      store<E, lanes>(static_cast<char*>(out.array[o]) + offset, out.streaming[o], line);
  }
};

template <bool streaming>
struct OneTarget {
  char* array;
  template <class E, size_t lanes>
  PHUB_HD void put(size_t offset, const Line<typename E::Acc, lanes>& line) const {
    store<E, lanes>(array + offset, streaming, line);
  }
};

// Calls body(sources, target) with the number of arrays compiled in.
template <int number = kStreams, class Target, class Body>
PHUB_HD void with_number(const void* const* in, int n, const Target& target, const Body& body) {
  if (n == number) return body(Sources(in, std::integral_constant<int, number>()), target);
  if constexpr (number > 1) with_number<number - 1>(in, n, target, body);
}

// Calls body(sources, targets). What is `frequent` and has one target gets a loop of its own for
// each number of arrays: the fewer instructions a line takes, the further the processor looks
// ahead, which is worth a tenth of the time with 8 arrays.
template <bool frequent, class Body>
PHUB_HD void specialise(const void* const* in, int n, const Targets& out, const Body& body) {
  if constexpr (frequent) {
    char* const array = static_cast<char*>(out.array[0]);
    if (out.n == 1 && out.streaming[0]) return with_number(in, n, OneTarget<true>{array}, body);
    if (out.n == 1) return with_number(in, n, OneTarget<false>{array}, body);
  }
  body(Sources(in, n), AnyTargets{out});
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

template <class E, size_t lanes, class N>
PHUB_HD Line<typename E::Acc, lanes> sum_line(const Sources<N>& in, size_t offset) {
  const auto line = [&](int k) {
    prefetch<lanes * sizeof(typename E::Wire)>(in.array[k] + offset);
    return load<E, lanes>(in.array[k] + offset);
  };
  auto result = line(0);
  if constexpr (std::is_same_v<N, int>) {
#pragma GCC unroll 1
    for (int k = 1; k < in.n; ++k) combine<Sum>(result, line(k));
  } else {
    for (int k = 1; k < in.n; ++k) combine<Sum>(result, line(k));
  }
  return result;
}

// Offsets below are in bytes of the wire's type; wider elements stand so many times further on:
template <class E>
inline constexpr size_t kWide = sizeof(typename E::Acc) / sizeof(typename E::Wire);

template <class In, class Out>
inline constexpr bool is_frequent = std::is_same_v<In, Out> && std::is_same_v<In, Plain<float>>;

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
      if (k == 0 && first)
        result = next;
      else
        combine<Op>(result, next);
    }
    store<Plain<Acc>, lanes>(at, false, result);
  }
}

// From arrays of In to arrays of Out, the type on the wire.
template <class In, class Out>
void sum(const Targets& out, const void* const* in, int n, size_t lines, double post) {
  using Acc = typename In::Acc;
  constexpr size_t lanes = kLanes<Out>;
  constexpr size_t wide = sizeof(typename In::Wire) / sizeof(typename Out::Wire);
  specialise<is_frequent<In, Out>>(in, n, out, [=](const auto& sources, const auto& targets) {
    for (size_t offset = 0; offset < lines * kLineBytes; offset += kLineBytes) {
      auto result = sum_line<In, lanes>(sources, offset * wide);
      scale_line(result, Acc(post));
      targets.template put<Out, lanes>(offset, result);
    }
  });
  if (out.any_streaming) finish_streaming();
}

// A rule over vectors: how many arrays of state it has, whether it reads them, and its step.
template <Rule rule, class Acc>
struct Stepper {
  static constexpr int states = rule == Rule::sgd ? 0 : 1;
  static constexpr bool reads_state = rule == Rule::sgd_momentum;
  SgdRule<Acc> sgd;

  explicit Stepper(const StepPass& pass) : sgd(pass.sgd, pass.scale) {}
  template <class V>
  PHUB_HD V step(V weight, V gradient, [[maybe_unused]] V* state) const {
    if constexpr (rule == Rule::sgd) return sgd.step(weight, gradient);
    if constexpr (rule == Rule::sgd_first) return sgd.first_step(weight, gradient, state[0]);
    if constexpr (rule == Rule::sgd_momentum) return sgd.step(weight, gradient, state[0]);
  }
};

// What Adam's rule is told. Not lambdas: these are always inlined.
struct Root {
  template <class V>
  PHUB_HD V operator()(V x) const {
    return square_root(x);
  }
};
struct Itself {
  template <class V>
  PHUB_HD V operator()(V second) const {
    return second;
  }
};
template <class V>
struct Largest {
  V& so_far;
  PHUB_HD V operator()(V second) const { return so_far = Max::combine(so_far, second); }
};

template <Rule rule, class Acc>
  requires(rule == Rule::adam || rule == Rule::amsgrad)
struct Stepper<rule, Acc> {
  static constexpr int states = rule == Rule::adam ? 2 : 3;
  static constexpr bool reads_state = true;
  AdamRule<Acc> adam;

  explicit Stepper(const StepPass& pass) : adam(pass.adam, pass.scale, pass.taken) {}
  template <class V>
  PHUB_HD V step(V weight, V gradient, V* state) const {
    if constexpr (rule == Rule::amsgrad)
      return adam.step(weight, gradient, state[0], state[1], Root(), Largest<V>{state[2]});
    else
      return adam.step(weight, gradient, state[0], state[1], Root(), Itself());
  }
};

// The arrays of state that a pass reads and writes.
struct States {
  char* array[kMaxStates];
  explicit States(const StepPass& pass) {
    for (int s = 0; s < kMaxStates; ++s) array[s] = static_cast<char*>(pass.state[s]);
  }
};

template <class R, class Acc, size_t lanes>
PHUB_HD Line<Acc, lanes> step_line(const R& rule, const Line<Acc, lanes>& gradient,
                                   const char* weights_at, const States& state, size_t offset) {
  constexpr size_t bytes = lanes * sizeof(Acc);
  constexpr int states = R::states;
  auto weights = load<Plain<Acc>, lanes>(weights_at);
  prefetch<bytes>(weights_at);
  Line<Acc, lanes> lines[states + 1];  // an array has at least one element
  for (int s = 0; s < states; ++s) {
    if constexpr (R::reads_state) lines[s] = load<Plain<Acc>, lanes>(state.array[s] + offset);
    prefetch<bytes>(state.array[s] + offset);
  }
  for (size_t p = 0; p < weights.parts; ++p) {
    Vector<Acc> parts[states + 1];
    for (int s = 0; s < states; ++s) parts[s] = lines[s].part[p];
    weights.part[p] = rule.step(weights.part[p], gradient.part[p], parts);
    for (int s = 0; s < states; ++s) lines[s].part[p] = parts[s];
  }
  for (int s = 0; s < states; ++s)
    store<Plain<Acc>, lanes>(state.array[s] + offset, false, lines[s]);
  return weights;
}

// Gradients in arrays of In, a model on the wire as Out.
template <class In, class Out, Rule kind>
void step(const StepPass& pass, const Targets& out, const void* const* in, int n, size_t lines) {
  using Acc = typename In::Acc;
  constexpr bool frequent =
      (kind == Rule::sgd_momentum || kind == Rule::adam) && is_frequent<In, Out>;
  constexpr size_t lanes = kLanes<Out>;
  constexpr size_t wide = sizeof(typename In::Wire) / sizeof(typename Out::Wire);
  const Stepper<kind, Acc> rule(pass);
  const char* const weights_in = static_cast<const char*>(pass.weights_in);
  char* const weights_out = static_cast<char*>(pass.weights_out);
  const States state(pass);
  specialise<frequent>(in, n, out, [=](const auto& sources, const auto& targets) {
    for (size_t offset = 0; offset < lines * kLineBytes; offset += kLineBytes) {
      const auto gradient = sum_line<In, lanes>(sources, offset * wide);
      const size_t at = offset * kWide<Out>;
      const auto weights = step_line(rule, gradient, weights_in + at, state, at);
      if constexpr (kWide<Out> > 1) store<Plain<Acc>, lanes>(weights_out + at, false, weights);
      targets.template put<Out, lanes>(offset, weights);
    }
  });
  if (out.any_streaming) finish_streaming();
}

// Sums and products of `Wrapping`, E or its unsigned counterpart, have the same bits as those of E.
template <class E, class Wrapping = E>
constexpr void fill(Loops& table, DType t) {
  Loops::Accumulate* row = table.accumulate[static_cast<int>(t)];
  row[0] = accumulate<Wrapping, Sum>;
  row[1] = accumulate<E, Min>;
  row[2] = accumulate<E, Max>;
  row[3] = accumulate<Wrapping, Product>;
  table.narrow[static_cast<int>(t)] = sum<Plain<uint8_t>, Plain<uint8_t>>;  // a copy of lines
}

constexpr void fill_bool(Loops& table, DType t) {
  Loops::Accumulate* row = table.accumulate[static_cast<int>(t)];
  row[0] = row[2] = accumulate<Bool, Or>;
  row[1] = row[3] = accumulate<Bool, And>;
  table.narrow[static_cast<int>(t)] = sum<Plain<uint8_t>, Plain<uint8_t>>;
}

template <class E, Rule rule>
constexpr void fill_step(Loops& table, DType t) {
  table.step[static_cast<int>(t)][static_cast<int>(rule)] = step<E, E, rule>;
  table.step_acc[static_cast<int>(t)][static_cast<int>(rule)] =
      step<Plain<typename E::Acc>, E, rule>;
}

template <class E>
constexpr void fill_float(Loops& table, DType t) {
  fill<E>(table, t);
  table.sum[static_cast<int>(t)] = sum<E, E>;
  table.narrow[static_cast<int>(t)] = sum<Plain<typename E::Acc>, E>;
  fill_step<E, Rule::sgd>(table, t);
  fill_step<E, Rule::sgd_first>(table, t);
  fill_step<E, Rule::sgd_momentum>(table, t);
  fill_step<E, Rule::adam>(table, t);
  fill_step<E, Rule::amsgrad>(table, t);
}

constexpr Loops make_loops() {
  Loops table{};
  fill_float<Plain<float>>(table, DType::f32);
  fill_float<Plain<double>>(table, DType::f64);
  fill_float<Half>(table, DType::f16);
  fill_float<Brain>(table, DType::bf16);
  fill<Plain<int32_t>, Plain<uint32_t>>(table, DType::i32);
  fill<Plain<int64_t>, Plain<uint64_t>>(table, DType::i64);
  fill<Plain<uint8_t>>(table, DType::u8);
  fill<Plain<int8_t>, Plain<uint8_t>>(table, DType::i8);
  fill_bool(table, DType::b8);
  return table;
}

constexpr Loops kLoops = make_loops();

}  // namespace
}  // namespace phub::PHUB_ISA
