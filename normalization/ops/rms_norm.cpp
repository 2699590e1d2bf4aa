#include "ops/rms_norm.h"

#include <optional>
#include <string>
#include <tuple>

#include "ops/row_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

Gate gate_named(const char* op, const std::string& activation) {
  if (activation == "silu") return Gate::kSilu;
  if (activation == "sigmoid") return Gate::kSigmoid;
  fail_check(op, "activation", "must be silu or sigmoid, got " + activation);
}

}  // namespace

Tensor rms_norm(const Tensor& input, const Tensor& gamma, double epsilon, bool zero_centered) {
  const int64_t width = check_rows("rms_norm", "input", input);
  check_parameter("rms_norm", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor parameter = as_contiguous(gamma);
  Tensor output = new_empty_like(rows);
  if (rows.numel() > 0) {
    launch_rms_norm({&rows, nullptr, Gate::kNone, nullptr, &parameter, epsilon, zero_centered, &output, nullptr});
  }
  return output;
}

Tensor rms_norm_gated(const Tensor& input, const Tensor& gate, const Tensor& gamma, double epsilon,
                      const std::string& activation) {
  const Gate gate_activation = gate_named("rms_norm_gated", activation);
  const int64_t width = check_rows("rms_norm_gated", "input", input);
  check_like("rms_norm_gated", "gate", gate, input);
  check_parameter("rms_norm_gated", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor gates = as_contiguous(gate);
  const Tensor parameter = as_contiguous(gamma);
  Tensor output = new_empty_like(rows);
  if (rows.numel() > 0) {
    launch_rms_norm({&rows, nullptr, gate_activation, &gates, &parameter, epsilon, false, &output, nullptr});
  }
  return output;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& gamma,
                                              double epsilon) {
  const int64_t width = check_rows("fused_add_rms_norm", "input", input);
  check_like("fused_add_rms_norm", "residual", residual, input);
  check_parameter("fused_add_rms_norm", "gamma", gamma, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor residuals = as_contiguous(residual);
  const Tensor parameter = as_contiguous(gamma);
  Tensor output = new_empty_like(rows);
  Tensor sum = new_empty_like(rows);
  if (rows.numel() > 0) {
    launch_rms_norm({&rows, &residuals, Gate::kNone, nullptr, &parameter, epsilon, false, &output, &sum});
  }
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
  const Tensor parameter = as_contiguous(gamma);
  Tensor grad_input = empty_gradient_like(rows, need_input);
  Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  if (need_input || need_gamma) {
    launch_rms_norm_backward({&grads, pointer_to(sum_grads), &rows, Gate::kNone, nullptr, &parameter, epsilon,
                              zero_centered, if_needed(grad_input, need_input), nullptr,
                              if_needed(grad_gamma, need_gamma)});
  }
  return {grad_input, grad_gamma};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& grad, const Tensor& input, const Tensor& gate,
                                                           const Tensor& gamma, double epsilon,
                                                           const std::string& activation, bool need_input,
                                                           bool need_gate, bool need_gamma) {
  const Gate gate_activation = gate_named("rms_norm_gated_backward", activation);
  const int64_t width = check_rows("rms_norm_gated_backward", "input", input);
  check_like("rms_norm_gated_backward", "grad", grad, input);
  check_like("rms_norm_gated_backward", "gate", gate, input);
  check_parameter("rms_norm_gated_backward", "gamma", gamma, input, width);
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(input);
  const Tensor gates = as_contiguous(gate);
  const Tensor parameter = as_contiguous(gamma);
  Tensor grad_input = empty_gradient_like(rows, need_input);
  Tensor grad_gate = empty_gradient_like(rows, need_gate);
  Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  if (need_input || need_gate || need_gamma) {
    launch_rms_norm_backward({&grads, nullptr, &rows, gate_activation, &gates, &parameter, epsilon, false,
                              if_needed(grad_input, need_input), if_needed(grad_gate, need_gate),
                              if_needed(grad_gamma, need_gamma)});
  }
  return {grad_input, grad_gate, grad_gamma};
}

}  // namespace rudnn
