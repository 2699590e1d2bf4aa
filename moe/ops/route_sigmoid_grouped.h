// The interface between the registered op and the backend that this build links.
#pragma once

#include "common/tensor.h"
#include "ops/limits.h"

namespace rudnn {

// Contiguous tensors on one device, at least one token, counts within ops/limits.h; groups divides E; top_k is at most
// selected_groups * E / groups.
//
// Scores are sigmoid(logits), corrected scores are scores + bias. A group's score is the sum of its two largest
// corrected scores, or its largest; selected_groups groups stay, and of their experts the top_k largest corrected
// scores are chosen, in descending order; among equals the lower id comes first, for groups and for experts. NaN counts
// as -inf. Weights are the chosen experts' scores, without bias. A row with NaN gets NaN weights.
struct RouteSigmoidGroupedCall {
  const Tensor* logits = nullptr;  // [T, E]
  const Tensor* bias = nullptr;    // float32 [E], optional
  int64_t top_k = 0;
  int64_t groups = 0;
  int64_t selected_groups = 0;
  bool group_top_two = false;
  bool renormalize = false;
  float scale = 1;
  const Tensor* indices = nullptr;  // int32 [T, top_k]
  const Tensor* weights = nullptr;  // [T, top_k], the logits' dtype
};

void launch_route_sigmoid_grouped(const RouteSigmoidGroupedCall& call);

}  // namespace rudnn
