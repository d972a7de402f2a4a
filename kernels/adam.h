// The rules of Adam and AdamW, as in torch.optim (D. P. Kingma and J. Ba, "Adam: a Method for
// Stochastic Optimization", 2015; amsgrad: S. J. Reddi et al., "On the Convergence of Adam and
// Beyond", 2018; decoupled weight decay: I. Loshchilov and F. Hutter, 2019). Compiled as sgd.h is.
#pragma once

#include <cmath>

#include "kernels/host_device.h"

namespace phub {

struct AdamParams {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool amsgrad = false;
  bool decoupled = false;  // the weight decay does not go through the moments: AdamW
  bool maximize = false;
};

// One step in the type T of the weights. `scale` multiplies the gradient; `taken`: steps before.
template <class T>
struct AdamRule {
  T scale, fresh1, beta2, fresh2, eps, weight_decay, keep, rate, inverse_root2;
  bool decays, decoupled;

  PHUB_HD AdamRule(const AdamParams& p, double scale, unsigned taken)
      : scale(T(p.maximize ? -scale : scale)),
        fresh1(T(1.0 - p.beta1)),
        beta2(T(p.beta2)),
        fresh2(T(1.0 - p.beta2)),
        eps(T(p.eps)),
        weight_decay(T(p.weight_decay)),
        keep(T(1.0 - p.lr * p.weight_decay)),
        rate(T(p.lr / (1.0 - pow(p.beta1, taken + 1.0)))),
        inverse_root2(T(1.0 / sqrt(1.0 - pow(p.beta2, taken + 1.0)))),
        decays(p.weight_decay != 0.0),
        decoupled(p.decoupled) {}

  // The new weight, for one element (V is T) or for a vector of them; updates the moments.
  // root(x): the square root. largest(second): what the amsgrad variant divides by, else `second`.
  template <class V, class Root, class Largest>
  PHUB_HD V step(V weight, V gradient, V& first, V& second, const Root& root,
                 const Largest& largest) const {
    V ascent = gradient * scale;
    if (decays && decoupled)
      weight = weight * keep;
    else if (decays)
      ascent = ascent + weight_decay * weight;
    first = first + fresh1 * (ascent - first);
    second = beta2 * second + fresh2 * (ascent * ascent);
    const V spread = root(largest(second)) * inverse_root2 + eps;
    return weight - rate * (first / spread);
  }
};

}  // namespace phub
