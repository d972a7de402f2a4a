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

// One step in the type T of the weights. `scale` multiplies the gradient.
template <class T>
struct SgdRule {
  T scale, lr, momentum, keep, weight_decay;
  bool decays, nesterov;

  PHUB_HD SgdRule(const SgdParams& p, double scale)
      : scale(T(p.maximize ? -scale : scale)),
        lr(T(p.lr)),
        momentum(T(p.momentum)),
        keep(T(1.0 - p.dampening)),
        weight_decay(T(p.weight_decay)),
        decays(p.weight_decay != 0.0),
        nesterov(p.nesterov) {}

  // What follows is for one element (V is T) or for a vector of them.

  // The direction of ascent: the scaled gradient and the weight decay.
  template <class V>
  PHUB_HD V direction(V weight, V gradient) const {
    const V scaled = gradient * scale;
    return decays ? scaled + weight_decay * weight : scaled;
  }

  // The new weight, without momentum.
  template <class V>
  PHUB_HD V step(V weight, V gradient) const {
    return weight - lr * direction(weight, gradient);
  }

  // The new weight, and the first value of `buffer`, its momentum: undampened.
  template <class V>
  PHUB_HD V first_step(V weight, V gradient, V& buffer) const {
    buffer = direction(weight, gradient);
    return weight - lr * (nesterov ? buffer + momentum * buffer : buffer);
  }

  // The new weight; updates `buffer`.
  template <class V>
  PHUB_HD V step(V weight, V gradient, V& buffer) const {
    const V ascent = direction(weight, gradient);
    buffer = momentum * buffer + keep * ascent;
    return weight - lr * (nesterov ? ascent + momentum * buffer : buffer);
  }
};

}  // namespace phub
