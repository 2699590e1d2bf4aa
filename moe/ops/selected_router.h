// The interface between the registered ops and the backend that this build links.
#pragma once

#include "common/tensor.h"
#include "ops/limits.h"
#include "ops/scoring.h"

namespace rudnn {

// Contiguous tensors on one device, at least one token, 1 <= k <= min(E, kMostSelected). Indices are int32 or int64 and
// may repeat; a row in which one is outside [0, E) comes out NaN as a whole.
struct SelectedRouterCall {
  const Tensor* logits = nullptr;   // [T, E]
  const Tensor* indices = nullptr;  // [T, k]
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool renormalize = false;
  float scale = 1;
  const Tensor* weights = nullptr;       // float32 [T, k], the output; null in the backward
  const Tensor* grad_weights = nullptr;  // float32 [T, k], given in the backward
  const Tensor* grad_logits = nullptr;   // [T, E], the logits' dtype: the output of the backward
};

void launch_selected_router_weights(const SelectedRouterCall& call);
void launch_selected_router_backward(const SelectedRouterCall& call);

}  // namespace rudnn
