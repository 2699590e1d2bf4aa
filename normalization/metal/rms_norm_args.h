// What launchers and shaders of rms_norm, rms_norm_gated and fused_add_rms_norm agree on.
#pragma once

#include "common/metal/fixed_width.h"

namespace rudnn {

struct RmsNormArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
  float epsilon;
  float root_epsilon;  // its square root
  float gamma_offset;  // 1 for zero-centred parameters
};

// Indices of [[buffer]] and [[function_constant]].
enum RmsNormBuffer : int {
  kArgsBuffer,
  kGammaBuffer,
  kInputBuffer,
  kResidualBuffer,
  kGateBuffer,
  kOutputBuffer,
  kSumBuffer,
  kGradBuffer,
  kGradSumBuffer,
  kGradInputBuffer,
  kGradGateBuffer,
  kGammaPartialsBuffer
};
enum RmsNormConstant : int {
  kGammaIsFloatConstant,
  kGatedConstant,
  kSigmoidConstant,
  kAddsResidualConstant,
  kAddsGradSumConstant,
  kWantsInputConstant,
  kWantsGateConstant,
  kWantsGammaConstant
};

}  // namespace rudnn
