// The interface between the registered layer norm ops and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Checked, contiguous tensors of one device; null where a call does without one. At least one row.
struct LayerNormCall {
  const Tensor* input = nullptr;
  const Tensor* residual = nullptr;  // fused_add_layer_norm
  const Tensor* gamma = nullptr;
  const Tensor* beta = nullptr;
  double epsilon = 0;
  const Tensor* output = nullptr;
  const Tensor* sum = nullptr;  // fused_add_layer_norm
};

// Possibly no rows; grad_gamma and grad_beta are then to be zeroed.
struct LayerNormBackwardCall {
  const Tensor* grad = nullptr;
  const Tensor* grad_sum = nullptr;
  const Tensor* input = nullptr;
  const Tensor* gamma = nullptr;
  double epsilon = 0;
  const Tensor* grad_input = nullptr;
  const Tensor* grad_gamma = nullptr;  // float32
  const Tensor* grad_beta = nullptr;   // float32
};

void launch_layer_norm(const LayerNormCall& call);
void launch_layer_norm_backward(const LayerNormBackwardCall& call);

}  // namespace rudnn
