// What kernels of every norm are told. Free of Torch, so that device code can include it.
#pragma once

#include "common/fixed_width.h"

#ifndef __METAL_VERSION__
#include <cmath>
#endif

namespace rudnn {

struct NormArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
  float epsilon;
  float root_epsilon;  // its square root
};

#ifndef __METAL_VERSION__
template <class Call>
NormArgs norm_args(const Call& call) {
  const int64_t width = call.gamma->numel();
  return {call.input->numel() / width, width, static_cast<float>(call.epsilon),
          static_cast<float>(std::sqrt(call.epsilon))};
}
#endif

}  // namespace rudnn
