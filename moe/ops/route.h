// The interface between the registered op and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Contiguous tensors on one device, at least one token. 1 <= top_k <= E.
//
// Softmax over all experts in float32, then the top_k largest, the lower expert first among equals, in descending order
// of weight. A row that holds NaN or +inf, or nothing but -inf, gets NaN weights and the experts 0 to top_k - 1 of an
// order in which NaN counts as the smallest; its experts are valid and distinct like any other row's.
struct RouteCall {
  const Tensor* logits = nullptr;  // [T, E]
  int64_t top_k = 0;
  bool renormalize = false;
  const Tensor* indices = nullptr;  // int32 [T, top_k]
  const Tensor* weights = nullptr;  // [T, top_k], the logits' dtype
};

void launch_route(const RouteCall& call);

}  // namespace rudnn
