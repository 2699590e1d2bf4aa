// The interface between the registered op and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Contiguous tensors on one device, at least one token. 1 <= top_k <= E.
//
// Scores are the softmax over all experts in float32. The top_k largest are chosen, in descending order, and among
// equal scores the lower expert comes first. In a row that holds NaN or +inf, or nothing but -inf, every score is NaN:
// its weights are NaN and its experts 0 to top_k - 1. With `renormalize` the chosen scores are divided by their sum
// plus kRenormalizeEpsilon.
struct RouteCall {
  const Tensor* logits = nullptr;  // [T, E]
  int64_t top_k = 0;
  bool renormalize = false;
  const Tensor* indices = nullptr;  // int32 [T, top_k]
  const Tensor* weights = nullptr;  // [T, top_k], the logits' dtype
};

void launch_route(const RouteCall& call);

}  // namespace rudnn
