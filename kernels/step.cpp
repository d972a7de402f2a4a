// Optimizer steps: in one pass with the sum of the gradients where possible, else strip by strip.
#include "kernels/passes.h"

namespace phub {
namespace {

// One step of SGD over all elements, to be run pass by pass.
class Step {
 public:
  Step(DType t, const SgdParams& params, const StepArrays& arrays, const Inputs& gradients,
       const Scale& scale, bool first, const Execution& execution)
      : t_(t),
        arrays_(arrays),
        gradients_(gradients),
        stores_(execution.stores),
        loops_(loops_of(execution)) {
    if (!is_floating(t))
      refuse("sgd", "a floating type, got type " + std::to_string(static_cast<int>(t)));
    if (params.momentum != 0.0 && !arrays.momentum)
      refuse("sgd", "an array for the momentum, got none");
    require_arrays("sgd", gradients.n, 1);
    // Weights of the wire's type are one destination more, which may be streamed.
    void* const own_weights = accumulator_type(t) == t ? nullptr : arrays.weights_out;
    momentum_ = params.momentum == 0.0 ? Momentum::none
                : first                ? Momentum::first
                                       : Momentum::steady;
    pass_ = {params, scale.post, arrays.weights_in, own_weights,
             momentum_ == Momentum::none ? nullptr : arrays.momentum};
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
    const auto loop = table[static_cast<int>(t_)][static_cast<int>(momentum_)];
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
  Momentum momentum_;
  StepPass pass_;
};

}  // namespace

void sgd(DType t, const SgdParams& params, const StepArrays& arrays, const void* acc, size_t count,
         const Scale& scale, bool first, const Execution& execution) {
  const Inputs inputs{&acc, 1, item_size(accumulator_type(t))};
  Step step(t, params, arrays, inputs, scale, first, execution);
  const size_t pass = step.fits_one_pass() ? count : Strip(t).count;
  for (size_t begin = 0; begin < count; begin += pass)
    step.run(true, View(inputs, 0, begin), begin, std::min(pass, count - begin));
}

void reduce_sgd(DType t, const SgdParams& params, const StepArrays& arrays, const void* const* in,
                int n, size_t count, const Scale& scale, bool first, const Execution& execution) {
  const Inputs inputs{in, n, item_size(t)};
  Step step(t, params, arrays, inputs, scale, first, execution);
  const auto sum = loops_of(execution).accumulate[static_cast<int>(t)][op_column(ReduceOp::sum)];
  const bool direct = n <= kStreams && scale.pre == 1.0;
  Strip strip(t);
  const void* const summed = strip.data();
  const View strip_view({&summed, 1, item_size(accumulator_type(t))}, 0, 0);
  const size_t pass = direct && step.fits_one_pass() ? count : strip.count;
  for (size_t begin = 0; begin < count; begin += pass) {
    const size_t size = std::min(pass, count - begin);
    if (direct) {
      step.run(false, View(inputs, 0, begin), begin, size);
    } else {
      accumulate(sum, t, inputs, begin, size, scale.pre, strip);
      step.run(true, strip_view, begin, size);
    }
  }
}

}  // namespace phub
