// The registered ops. Each checks what memory safety needs, takes any strides, and returns fresh contiguous tensors.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "common/tensor.h"

namespace rudnn {

Tensor rms_norm(const Tensor& input, const Tensor& gamma, double epsilon, bool zero_centered);
Tensor rms_norm_gated(const Tensor& input, const Tensor& gate, const Tensor& gamma, double epsilon,
                      const std::string& activation);
std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& gamma,
                                              double epsilon);

Tensor layer_norm(const Tensor& input, const Tensor& gamma, const std::optional<Tensor>& beta, double epsilon);
std::tuple<Tensor, Tensor> fused_add_layer_norm(const Tensor& input, const Tensor& residual, const Tensor& gamma,
                                                const std::optional<Tensor>& beta, double epsilon);

Tensor softmax_last_axis(const Tensor& input);

// Gradients that are not needed come back with shape (0,). Those of parameters are float32. grad_sum is the gradient of
// the second output of the fused op, whose sum is then `input`.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                             const Tensor& input, const Tensor& gamma, double epsilon,
                                             bool zero_centered, bool need_input, bool need_gamma);
std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& grad, const Tensor& input, const Tensor& gate,
                                                           const Tensor& gamma, double epsilon,
                                                           const std::string& activation, bool need_input,
                                                           bool need_gate, bool need_gamma);
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                       const Tensor& input, const Tensor& gamma, double epsilon,
                                                       bool need_input, bool need_gamma, bool need_beta);
Tensor softmax_last_axis_backward(const Tensor& grad, const Tensor& output);

}  // namespace rudnn
