// The interface between the registered softmax ops and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// All tensors are contiguous, of one shape, dtype and device, and have at least one element.
void launch_softmax_last_axis(const Tensor& input, const Tensor& output);
void launch_softmax_last_axis_backward(const Tensor& grad, const Tensor& output, const Tensor& grad_input);

}  // namespace rudnn
