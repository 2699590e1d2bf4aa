// The interface between the registered ops and the backend that this build links.
#pragma once

#include <string>

#include "common/tensor.h"

namespace rudnn {

// Expert e is down[e] (silu(gate[e] x) * (up[e] x)), float32 inside, h = silu(..) * (..) rounded to the weights' dtype
// before it meets down. The rows of a weight are contiguous and lie one after the other; from expert to expert it is
// stride(0) elements, since gate and up may be halves of one tensor. All of one float dtype.
struct ExpertWeights {
  const Tensor* gate = nullptr;  // [E, I, H]
  const Tensor* up = nullptr;    // [E, I, H]
  const Tensor* down = nullptr;  // [E, H, I]
};

// Rows of an expert are expert_offsets[e] to expert_offsets[e + 1], int32; what they hold is not trusted: they are
// clamped to [0, R], and one that falls counts as the largest before it, so no row belongs to two experts. Rows of no
// expert, before expert_offsets[0] and from expert_offsets[E] on, come out 0. A row's result has the same bits whatever
// the other rows are. E, H and I are at least 1, R may be 0.
struct ExpertsCall {
  bool tensor_core = false;
  const Tensor* values = nullptr;          // [R, H]
  const Tensor* expert_offsets = nullptr;  // [E + 1]
  ExpertWeights weights;
  const Tensor* output = nullptr;           // [R, H]
  const Tensor* gate_projection = nullptr;  // [R, I], gate x rounded; for training, else null
  const Tensor* up_projection = nullptr;    // [R, I]
};

struct ExpertsBackwardCall {
  bool tensor_core = false;
  const Tensor* grad = nullptr;            // [R, H]
  const Tensor* values = nullptr;          // [R, H]
  const Tensor* expert_offsets = nullptr;  // [E + 1]
  ExpertWeights weights;
  const Tensor* gate_projection = nullptr;  // [R, I], as the forward wrote it
  const Tensor* up_projection = nullptr;    // [R, I]
  const Tensor* grad_values = nullptr;      // [R, H], optional
  // Shaped and strided like the weights, each optional; float32, or all of the weights' dtype, rounded from the same
  // float32 sums, of which denormal ones may become 0. Each element is written once, those of experts without rows as
  // exact zeros. The rows of an expert are summed in a fixed order.
  ExpertWeights grad_weights;
};

// output[t] = the sum over j of weights[t, j] * expert(indices[t, j])(input[t]), summed in float32 in an order that
// depends on the token's own choices only, rounded once; on CUDA each expert's result is rounded before it is weighted.
// An index outside [0, E) adds nothing.
struct FusedExpertsCall {
  bool tensor_core = false;
  const Tensor* input = nullptr;    // [T, H], T >= 1
  const Tensor* indices = nullptr;  // int32 or int64 [T, k], k >= 1
  const Tensor* weights = nullptr;  // [T, k], any float dtype
  ExpertWeights expert_weights;
  const Tensor* output = nullptr;  // [T, H]
};

void launch_experts(const ExpertsCall& call);
void launch_experts_backward(const ExpertsBackwardCall& call);
void launch_fused_experts(const FusedExpertsCall& call);

// Whether the hardware multiplies matrices of this dtype, which is what `tensor_core` asks for. A CPU with AVX512-BF16
// but without AMX has it for the forward; gradients are then computed in float32 arithmetic, as with `scalar`.
bool has_tensor_core(DType dtype);

}  // namespace rudnn
