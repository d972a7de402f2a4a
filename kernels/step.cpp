// Optimizer steps: in one pass with the sum of the gradients where possible, else strip by strip.
#include "kernels/passes.h"

namespace phub {
namespace {

Rule rule_of(const Update& update, uint32_t taken) {
  if (const auto* adam = std::get_if<AdamParams>(&update))
    return adam->amsgrad ? Rule::amsgrad : Rule::adam;
  if (std::get<SgdParams>(update).momentum == 0.0) return Rule::sgd;
  return taken == 0 ? Rule::sgd_first : Rule::sgd_momentum;
}

// One step of an optimizer over all elements, to be run pass by pass.
class Step {
 public:
  Step(DType t, const Update& update, const StepArrays& arrays, const Inputs& gradients,
       const Scale& scale, uint32_t taken, const Execution& execution)
      : t_(t),
        arrays_(arrays),
        gradients_(gradients),
        stores_(execution.stores),
        loops_(loops_of(execution)),
        rule_(rule_of(update, taken)) {
    if (!is_floating(t))
      refuse("step", "a floating type, got type " + std::to_string(static_cast<int>(t)));
    require_arrays("step", gradients.n, 1);
    // Weights of the wire's type are one destination more, which may be streamed.
    void* const own_weights = accumulator_type(t) == t ? nullptr : arrays.weights_out;
    pass_ = {{}, {}, scale.post, taken, arrays.weights_in, own_weights, {}};
    if (const auto* sgd = std::get_if<SgdParams>(&update)) pass_.sgd = *sgd;
    if (const auto* adam = std::get_if<AdamParams>(&update)) pass_.adam = *adam;
    for (int s = 0; s < state_arrays(update); ++s) {
      if (!arrays.state[s])
        refuse("step",
               std::to_string(state_arrays(update)) + " arrays of state, got " + std::to_string(s));
      pass_.state[s] = arrays.state[s];
    }
  }

  // One pass writes all outputs, so that it may be as long as the arrays.
  bool fits_one_pass() const { return arrays_.n_out < kTargets; }

  // Elements [begin, begin + count); the gradient is the sum of arrays of type t, or `accumulated`.
  void run(bool accumulated, const View& gradients, size_t begin, size_t count) {
    Destinations to(t_, begin);
    if (!pass_.weights_out) to.add(arrays_.weights_out, streams(arrays_.weights_out));
    int o = 0;
    for (; o < arrays_.n_out && !to.full(); ++o) to.add(arrays_.outs[o], streams(arrays_.outs[o]));
    const auto& table = accumulated ? loops_.step_acc : loops_.step;
    const auto loop = table[static_cast<int>(t_)][static_cast<int>(rule_)];
    const size_t offset = begin * item_size(accumulator_type(t_));
    phub::run(loop, t_, pass_.at(offset), to.targets(), gradients, count);
    write_out(loops_, t_, arrays_.outs + o, arrays_.n_out - o, gradients_, begin, count,
              advance(arrays_.weights_out, offset), 1.0, stores_);
  }

 private:
  bool streams(const void* out) const {
    return stores_ == Stores::streaming && out != arrays_.weights_in && !gradients_.contain(out);
  }

  const DType t_;
  const StepArrays& arrays_;
  const Inputs& gradients_;
  const Stores stores_;
  const Loops& loops_;
  const Rule rule_;
  StepPass pass_;
};

}  // namespace

void step(DType t, const Update& update, const StepArrays& arrays, const void* acc, size_t count,
          const Scale& scale, uint32_t taken, const Execution& execution) {
  const Inputs inputs{&acc, 1, item_size(accumulator_type(t))};
  Step whole(t, update, arrays, inputs, scale, taken, execution);
  const size_t pass = whole.fits_one_pass() ? count : Strip(t).count;
  for (size_t begin = 0; begin < count; begin += pass)
    whole.run(true, View(inputs, 0, begin), begin, std::min(pass, count - begin));
}

void reduce_step(DType t, const Update& update, const StepArrays& arrays, const void* const* in,
                 int n, size_t count, const Scale& scale, uint32_t taken,
                 const Execution& execution) {
  const Inputs inputs{in, n, item_size(t)};
  Step whole(t, update, arrays, inputs, scale, taken, execution);
  const auto sum = loops_of(execution).accumulate[static_cast<int>(t)][op_column(ReduceOp::sum)];
  const bool direct = n <= kStreams && scale.pre == 1.0;
  Strip strip(t);
  const void* const summed = strip.data();
  const View strip_view({&summed, 1, item_size(accumulator_type(t))}, 0, 0);
  const size_t pass = direct && whole.fits_one_pass() ? count : strip.count;
  for (size_t begin = 0; begin < count; begin += pass) {
    const size_t size = std::min(pass, count - begin);
    if (direct) {
      whole.run(false, View(inputs, 0, begin), begin, size);
    } else {
      accumulate(sum, t, inputs, begin, size, scale.pre, strip);
      whole.run(true, strip_view, begin, size);
    }
  }
}

}  // namespace phub
