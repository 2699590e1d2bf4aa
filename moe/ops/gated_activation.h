// The interface between the registered ops and the backend that this build links.
#pragma once

#include "common/tensor.h"
#include "ops/activation.h"

namespace rudnn {

// Contiguous tensors of one dtype and device, at least one element. output = activation(a) * b for the halves a, b of
// input's last axis, in float32, rounded once.
struct GatedActivationCall {
  const Tensor* input = nullptr;  // [..., 2 d]
  Activation activation = Activation::kSilu;
  const Tensor* output = nullptr;      // [..., d]; null in the backward
  const Tensor* grad = nullptr;        // [..., d], given in the backward
  const Tensor* grad_input = nullptr;  // [..., 2 d], the output of the backward
};

void launch_gated_activation(const GatedActivationCall& call);
void launch_gated_activation_backward(const GatedActivationCall& call);

}  // namespace rudnn
