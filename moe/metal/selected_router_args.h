// What launcher and shaders of selected_router agree on.
#pragma once

#include "common/fixed_width.h"
#include "metal/router_limits.h"
#include "ops/limits.h"

namespace rudnn {

struct SelectedRouterArgs {
  int64_t tokens;
  int32_t experts;
  int32_t choices;  // experts of a token
  float scale;
  float renormalize_epsilon;
};

// Indices of [[buffer]] and [[function_constant]].
enum SelectedRouterBuffer : int {
  kArgsBuffer,
  kLogitsBuffer,
  kIndicesBuffer,
  kWeightsBuffer,
  kGradWeightsBuffer,
  kGradLogitsBuffer
};
enum SelectedRouterConstant : int { kLongIndicesConstant, kSigmoidConstant, kRenormalizeConstant };

enum SelectedRouterLimit : int { kHeldChoices = kMostSelected / kSimdgroupSize };  // that a thread has of its token

}  // namespace rudnn
