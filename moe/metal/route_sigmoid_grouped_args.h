// What launcher and shader of route_sigmoid_grouped agree on.
#pragma once

#include "common/fixed_width.h"
#include "metal/router_limits.h"
#include "ops/limits.h"

namespace rudnn {

struct RouteSigmoidGroupedArgs {
  int64_t tokens;
  int32_t experts;
  int32_t top_k;
  int32_t groups;
  int32_t selected_groups;
  float scale;
  float renormalize_epsilon;
};

// Indices of [[buffer]] and [[function_constant]].
enum RouteSigmoidGroupedBuffer : int { kArgsBuffer, kLogitsBuffer, kBiasBuffer, kIndicesBuffer, kWeightsBuffer };
enum RouteSigmoidGroupedConstant : int { kHasBiasConstant, kGroupTopTwoConstant, kRenormalizeConstant };

}  // namespace rudnn
