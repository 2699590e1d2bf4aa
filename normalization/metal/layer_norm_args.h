// What launchers and shaders of layer_norm and fused_add_layer_norm agree on.
#pragma once

#include "common/metal/fixed_width.h"

namespace rudnn {

struct LayerNormArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
  float epsilon;
  float root_epsilon;  // its square root
};

// Indices of [[buffer]] and [[function_constant]].
enum LayerNormBuffer : int {
  kArgsBuffer,
  kGammaBuffer,
  kBetaBuffer,
  kInputBuffer,
  kResidualBuffer,
  kOutputBuffer,
  kSumBuffer,
  kGradBuffer,
  kGradSumBuffer,
  kGradInputBuffer,
  kGammaPartialsBuffer,
  kBetaPartialsBuffer
};
enum LayerNormConstant : int {
  kGammaIsFloatConstant,
  kHasBetaConstant,
  kBetaIsFloatConstant,
  kAddsResidualConstant,
  kAddsGradSumConstant,
  kWantsInputConstant,
  kWantsGammaConstant,
  kWantsBetaConstant
};

}  // namespace rudnn
