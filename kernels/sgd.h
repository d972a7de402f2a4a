// The rule of SGD, as in torch.optim.SGD. Compiled by g++ into the CPU loops and by nvcc or NVRTC
// into the CUDA kernels, so it needs no header but the one below.
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

  // What follows is for one element (V is T) or for a vector of them.

  // The gradient with weight decay, and with the sign that descends.
  template <class V>
  PHUB_HD V direction(V weight, V gradient) const {
    const V descent = maximize ? -gradient : gradient;
    return decays ? descent + weight_decay * weight : descent;
  }

  // The new weight, without momentum.
  template <class V>
  PHUB_HD V step(V weight, V gradient) const {
    return weight - lr * direction(weight, gradient);
  }

  // The new weight; updates `buffer`, its momentum.
  template <class V>
  PHUB_HD V step(V weight, V gradient, V& buffer) const {
    const V g = direction(weight, gradient);
    buffer = first ? g : momentum * buffer + keep * g;
    return weight - lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

}  // namespace phub
