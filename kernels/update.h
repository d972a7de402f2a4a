// What an optimizer does in a step: a rule, and its values.
#pragma once

#include <variant>

#include "kernels/adam.h"
#include "kernels/sgd.h"

namespace phub {

using Update = std::variant<SgdParams, AdamParams>;

// Arrays of state, of the weights' size, that a rule keeps. SGD: momentum. Adam: first moment,
// second moment and, with amsgrad, the largest second moment so far.
inline constexpr int kMaxStates = 3;

inline int state_arrays(const Update& update) {
  if (const auto* adam = std::get_if<AdamParams>(&update)) return adam->amsgrad ? 3 : 2;
  return std::get<SgdParams>(update).momentum != 0.0 ? 1 : 0;
}

}  // namespace phub
