// The interface between the registered layer norm ops and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Checked, contiguous tensors of one device with at least one element. Null pointers mark what a call does without.
struct LayerNormCall {
  const Tensor* input;
  const Tensor* residual;  // fused_add_layer_norm
  const Tensor* gamma;
  const Tensor* beta;
  double epsilon;
  const Tensor* output;
  const Tensor* sum;  // fused_add_layer_norm
};

struct LayerNormBackwardCall {
  const Tensor* grad;
  const Tensor* grad_sum;
  const Tensor* input;
  const Tensor* gamma;
  double epsilon;
  const Tensor* grad_input;
  const Tensor* grad_gamma;  // float32
  const Tensor* grad_beta;   // float32
};

void launch_layer_norm(const LayerNormCall& call);
void launch_layer_norm_backward(const LayerNormBackwardCall& call);

}  // namespace rudnn
