// What launchers and shaders of combine agree on.
#pragma once

#include "common/fixed_width.h"

namespace rudnn {

struct CombineArgs {
  int64_t tokens;
  int64_t choices;  // experts of a token
  int64_t rows;     // of the experts' output
  int64_t width;    // elements of a row, which are contiguous, as are the rows
};

// Indices of [[buffer]] and [[function_constant]].
enum CombineBuffer : int {
  kArgsBuffer,
  kExpertOutputBuffer,
  kWeightsBuffer,
  kSlotRowsBuffer,
  kRowSlotsBuffer,
  kOutputBuffer,
  kGradBuffer,
  kGradExpertOutputBuffer,
  kGradWeightsBuffer
};
enum CombineConstant : int { kWeightTypeConstant };

enum CombineLimit : int { kDotThreads = 128 };  // of a threadgroup that computes gradients of weights

}  // namespace rudnn
