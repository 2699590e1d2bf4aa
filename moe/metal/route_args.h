// What launcher and shader of route agree on.
#pragma once

#include "common/fixed_width.h"
#include "metal/router_limits.h"

namespace rudnn {

struct RouteArgs {
  int64_t tokens;
  int32_t experts;
  int32_t top_k;
  float renormalize_epsilon;
};

// Indices of [[buffer]] and [[function_constant]].
enum RouteBuffer : int { kArgsBuffer, kLogitsBuffer, kIndicesBuffer, kWeightsBuffer };
enum RouteConstant : int { kRenormalizeConstant };

}  // namespace rudnn
