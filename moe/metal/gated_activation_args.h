// What launcher and shader of gated_activation agree on.
#pragma once

#include "common/fixed_width.h"

namespace rudnn {

struct GatedActivationArgs {
  int64_t rows;
  int64_t width;  // of a half, which is as wide as the output
};

// Indices of [[buffer]] and [[function_constant]].
enum GatedActivationBuffer : int { kArgsBuffer, kInputBuffer, kOutputBuffer, kGradBuffer, kGradInputBuffer };
enum GatedActivationConstant : int { kActivationConstant };

}  // namespace rudnn
