// What launchers and shaders of the norms agree on.
#pragma once

#include "ops/norm_args.h"

namespace rudnn {

// Indices of [[buffer]] and [[function_constant]]. No kernel has all of them.
enum NormBuffer : int {
  kArgsBuffer,
  kGammaBuffer,
  kBetaBuffer,
  kInputBuffer,
  kResidualBuffer,
  kGateBuffer,
  kOutputBuffer,
  kSumBuffer,
  kGradBuffer,
  kGradSumBuffer,
  kGradInputBuffer,
  kGradGateBuffer,
  kGammaPartialsBuffer,
  kBetaPartialsBuffer
};
enum NormConstant : int {
  kGammaIsFloatConstant,
  kZeroCenteredConstant,
  kHasBetaConstant,
  kBetaIsFloatConstant,
  kGatedConstant,
  kSigmoidConstant,
  kAddsResidualConstant,
  kAddsGradSumConstant,
  kWantsInputConstant,
  kWantsGateConstant,
  kWantsGammaConstant,
  kWantsBetaConstant
};

}  // namespace rudnn
