// The interface between the registered RMS norm ops and the backend that this build links.
#pragma once

#include "common/tensor.h"
#include "ops/gate.h"

namespace rudnn {

// Checked, contiguous tensors of one device with at least one element. Null pointers mark what a call does without.
struct RmsNormCall {
  const Tensor* input;
  const Tensor* residual;  // fused_add_rms_norm
  Gate gate_activation;
  const Tensor* gate;  // rms_norm_gated
  const Tensor* gamma;
  double epsilon;
  bool zero_centered;
  const Tensor* output;
  const Tensor* sum;  // fused_add_rms_norm
};

struct RmsNormBackwardCall {
  const Tensor* grad;
  const Tensor* grad_sum;
  const Tensor* input;
  Gate gate_activation;
  const Tensor* gate;
  const Tensor* gamma;
  double epsilon;
  bool zero_centered;
  const Tensor* grad_input;
  const Tensor* grad_gate;
  const Tensor* grad_gamma;  // float32
};

void launch_rms_norm(const RmsNormCall& call);
void launch_rms_norm_backward(const RmsNormBackwardCall& call);

}  // namespace rudnn
