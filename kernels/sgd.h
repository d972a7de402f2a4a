// SGD, the rule for one element; as torch.optim.SGD. Compiled by g++ into the CPU loops and by
// nvcc or NVRTC into the CUDA kernels, so it needs no header but the one below.
#pragma once

#include "kernels/host_device.h"

namespace phub {

struct SgdParams {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
};

// The parameters of one step in the type T that the weights have. `first`: the momentum is not
// set yet and becomes the gradient, undampened.
template <class T>
struct SgdRule {
  T lr, momentum, keep, weight_decay;
  bool decays, nesterov, first, maximize;

  PHUB_HD SgdRule(const SgdParams& p, bool first)
      : lr(T(p.lr)),
        momentum(T(p.momentum)),
        keep(T(1.0 - p.dampening)),
        weight_decay(T(p.weight_decay)),
        decays(p.weight_decay != 0.0),
        nesterov(p.nesterov),
        first(first),
        maximize(p.maximize) {}

  // Weight decay, and the direction.
  PHUB_HD T gradient(T gradient, T weight) const {
    const T signed_gradient = maximize ? -gradient : gradient;
    return decays ? signed_gradient + weight_decay * weight : signed_gradient;
  }

  // The new weight without momentum.
  PHUB_HD T step(T weight, T raw_gradient) const {
    return weight - lr * gradient(raw_gradient, weight);
  }

  // The new weight; updates `buffer`, the element's momentum.
  PHUB_HD T step(T weight, T raw_gradient, T& buffer) const {
    const T g = gradient(raw_gradient, weight);
    buffer = first ? g : momentum * buffer + keep * g;
    return weight - lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

}  // namespace phub
