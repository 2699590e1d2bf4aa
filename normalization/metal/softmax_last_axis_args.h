// What launchers and shaders of softmax_last_axis agree on.
#pragma once

#include "common/fixed_width.h"

namespace rudnn {

struct SoftmaxArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
};

// Indices of [[buffer]].
enum SoftmaxBuffer : int { kArgsBuffer, kInputBuffer, kOutputBuffer, kGradBuffer, kGradInputBuffer };

}  // namespace rudnn
