// What launcher and shader of sum_partials agree on.
#pragma once

#include "common/fixed_width.h"

namespace rudnn {

struct ParameterSumsArgs {
  int64_t count;  // of partial rows
  int64_t width;
};

// Indices of [[buffer]].
enum ParameterSumsBuffer : int { kSumsArgsBuffer, kPartialsBuffer, kSumsBuffer };

}  // namespace rudnn
