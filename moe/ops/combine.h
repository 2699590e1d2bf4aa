// The interface between the registered ops and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Contiguous tensors on one device, at least one token. What the maps hold is not trusted: an entry out of range counts
// as -1, a slot without a row or a row that is nobody's (ops/dispatch.h).
//
// output[t] = the sum over j of weights[t, j] * expert_output[slot_rows[t, j]], in float32 and in the order of j,
// rounded once.
struct CombineCall {
  const Tensor* expert_output = nullptr;  // [R, H]
  const Tensor* weights = nullptr;        // [T, k], any float dtype
  const Tensor* slot_rows = nullptr;      // int32 [T, k]
  const Tensor* output = nullptr;         // [T, H], the expert output's dtype
};

// grad_expert_output[r] = weight * grad of the row's slot and token, 0 for a row that is nobody's.
// grad_weights[t, j] = the dot product of expert_output[slot_rows[t, j]] and grad[t], 0 for a slot without a row.
struct CombineBackwardCall {
  const Tensor* grad = nullptr;           // [T, H]
  const Tensor* expert_output = nullptr;  // [R, H]
  const Tensor* weights = nullptr;        // [T, k], any float dtype
  const Tensor* row_slots = nullptr;      // int32 [R]
  const Tensor* slot_rows = nullptr;      // int32 [T, k]
  bool plane = false;                     // the lanes of a warp share each dot product, instead of one doing it alone
  const Tensor* grad_expert_output = nullptr;  // [R, H], the expert output's dtype; optional
  const Tensor* grad_weights = nullptr;        // float32 [T, k]; optional
};

void launch_combine(const CombineCall& call);
void launch_combine_backward(const CombineBackwardCall& call);

}  // namespace rudnn
