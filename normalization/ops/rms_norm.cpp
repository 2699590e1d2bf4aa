#include "ops/rms_norm.h"

#include <optional>
#include <string>
#include <tuple>

#include "ops/row_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

GateActivation activation_named(const char* op, const std::string& name) {
  if (name == "silu") return GateActivation::kSilu;
  if (name == "sigmoid") return GateActivation::kSigmoid;
  fail_check(op, "activation", "must be silu or sigmoid, got " + name);
}

}  // namespace

Tensor rms_norm(const Tensor& input, const Tensor& gamma, double epsilon, bool zero_centered) {
  const int64_t width = check_rows("rms_norm", "input", input);
  check_parameter("rms_norm", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor weight = as_contiguous(gamma);
  const Tensor output = new_empty_like(rows);
  RmsNormCall call;
  call.input = &rows;
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.zero_centered = zero_centered;
  call.output = &output;
  if (rows.numel() > 0) launch_rms_norm(call);
  return output;
}

Tensor rms_norm_gated(const Tensor& input, const Tensor& gate, const Tensor& gamma, double epsilon,
                      const std::string& activation) {
  const int64_t width = check_rows("rms_norm_gated", "input", input);
  check_like("rms_norm_gated", "gate", gate, input);
  check_parameter("rms_norm_gated", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor gates = as_contiguous(gate);
  const Tensor weight = as_contiguous(gamma);
  const Tensor output = new_empty_like(rows);
  RmsNormCall call;
  call.input = &rows;
  call.gate = &gates;
  call.activation = activation_named("rms_norm_gated", activation);
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.output = &output;
  if (rows.numel() > 0) launch_rms_norm(call);
  return output;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& gamma,
                                              double epsilon) {
  const int64_t width = check_rows("fused_add_rms_norm", "input", input);
  check_like("fused_add_rms_norm", "residual", residual, input);
  check_parameter("fused_add_rms_norm", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor residuals = as_contiguous(residual);
  const Tensor weight = as_contiguous(gamma);
  const Tensor output = new_empty_like(rows);
  const Tensor sum = new_empty_like(rows);
  RmsNormCall call;
  call.input = &rows;
  call.residual = &residuals;
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.output = &output;
  call.sum = &sum;
  if (rows.numel() > 0) launch_rms_norm(call);
  return {output, sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                             const Tensor& input, const Tensor& gamma, double epsilon,
                                             bool zero_centered, bool need_input, bool need_gamma) {
  const int64_t width = check_rows("rms_norm_backward", "input", input);
  check_like("rms_norm_backward", "grad", grad, input);
  if (grad_sum) check_like("rms_norm_backward", "grad_sum", *grad_sum, input);
  check_parameter("rms_norm_backward", "gamma", gamma, input, width);
  const Tensor grads = as_contiguous(grad);
  const std::optional<Tensor> sum_grads = as_contiguous(grad_sum);
  const Tensor rows = as_contiguous(input);
  const Tensor weight = as_contiguous(gamma);
  const Tensor grad_input = empty_row_gradient(rows, need_input);
  const Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  RmsNormBackwardCall call;
  call.grad = &grads;
  call.grad_sum = pointer_to(sum_grads);
  call.input = &rows;
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.zero_centered = zero_centered;
  call.grad_input = need_input ? &grad_input : nullptr;
  call.grad_gamma = need_gamma ? &grad_gamma : nullptr;
  if (need_input || need_gamma) launch_rms_norm_backward(call);
  return {grad_input, grad_gamma};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& grad, const Tensor& input, const Tensor& gate,
                                                           const Tensor& gamma, double epsilon,
                                                           const std::string& activation, bool need_input,
                                                           bool need_gate, bool need_gamma) {
  const int64_t width = check_rows("rms_norm_gated_backward", "input", input);
  check_like("rms_norm_gated_backward", "grad", grad, input);
  check_like("rms_norm_gated_backward", "gate", gate, input);
  check_parameter("rms_norm_gated_backward", "gamma", gamma, input, width);
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(input);
  const Tensor gates = as_contiguous(gate);
  const Tensor weight = as_contiguous(gamma);
  const Tensor grad_input = empty_row_gradient(rows, need_input);
  const Tensor grad_gate = empty_row_gradient(rows, need_gate);
  const Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  RmsNormBackwardCall call;
  call.grad = &grads;
  call.input = &rows;
  call.gate = &gates;
  call.activation = activation_named("rms_norm_gated_backward", activation);
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.grad_input = need_input ? &grad_input : nullptr;
  call.grad_gate = need_gate ? &grad_gate : nullptr;
  call.grad_gamma = need_gamma ? &grad_gamma : nullptr;
  if (need_input || need_gate || need_gamma) launch_rms_norm_backward(call);
  return {grad_input, grad_gate, grad_gamma};
}

}  // namespace rudnn
