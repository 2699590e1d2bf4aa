// The interface between the registered RMS norm ops and the backend that this build links.
#pragma once

#include "common/tensor.h"
#include "ops/gate.h"

namespace rudnn {

// Checked, contiguous tensors of one device; null where a call does without one. At least one row.
struct RmsNormCall {
  const Tensor* input = nullptr;
  const Tensor* residual = nullptr;  // fused_add_rms_norm
  const Tensor* gate = nullptr;      // rms_norm_gated
  GateActivation activation = GateActivation::kSilu;
  const Tensor* gamma = nullptr;
  double epsilon = 0;
  bool zero_centered = false;
  const Tensor* output = nullptr;
  const Tensor* sum = nullptr;  // fused_add_rms_norm
};

// Possibly no rows; grad_gamma is then to be zeroed.
struct RmsNormBackwardCall {
  const Tensor* grad = nullptr;
  const Tensor* grad_sum = nullptr;
  const Tensor* input = nullptr;
  const Tensor* gate = nullptr;
  GateActivation activation = GateActivation::kSilu;
  const Tensor* gamma = nullptr;
  double epsilon = 0;
  bool zero_centered = false;
  const Tensor* grad_input = nullptr;
  const Tensor* grad_gate = nullptr;
  const Tensor* grad_gamma = nullptr;  // float32
};

void launch_rms_norm(const RmsNormCall& call);
void launch_rms_norm_backward(const RmsNormBackwardCall& call);

}  // namespace rudnn
