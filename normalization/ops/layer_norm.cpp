#include "ops/layer_norm.h"

#include <optional>
#include <tuple>

#include "ops/row_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {

Tensor layer_norm(const Tensor& input, const Tensor& gamma, const std::optional<Tensor>& beta, double epsilon) {
  const int64_t width = check_rows("layer_norm", "input", input);
  check_parameter("layer_norm", "gamma", gamma, input, width);
  if (beta) check_parameter("layer_norm", "beta", *beta, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor weight = as_contiguous(gamma);
  const std::optional<Tensor> bias = as_contiguous(beta);
  const Tensor output = new_empty_like(rows);
  LayerNormCall call;
  call.input = &rows;
  call.gamma = &weight;
  call.beta = pointer_to(bias);
  call.epsilon = epsilon;
  call.output = &output;
  if (rows.numel() > 0) launch_layer_norm(call);
  return output;
}

std::tuple<Tensor, Tensor> fused_add_layer_norm(const Tensor& input, const Tensor& residual, const Tensor& gamma,
                                                const std::optional<Tensor>& beta, double epsilon) {
  const int64_t width = check_rows("fused_add_layer_norm", "input", input);
  check_like("fused_add_layer_norm", "residual", residual, input);
  check_parameter("fused_add_layer_norm", "gamma", gamma, input, width);
  if (beta) check_parameter("fused_add_layer_norm", "beta", *beta, input, width);
  const Tensor rows = as_contiguous(input);
  const Tensor residuals = as_contiguous(residual);
  const Tensor weight = as_contiguous(gamma);
  const std::optional<Tensor> bias = as_contiguous(beta);
  const Tensor output = new_empty_like(rows);
  const Tensor sum = new_empty_like(rows);
  LayerNormCall call;
  call.input = &rows;
  call.residual = &residuals;
  call.gamma = &weight;
  call.beta = pointer_to(bias);
  call.epsilon = epsilon;
  call.output = &output;
  call.sum = &sum;
  if (rows.numel() > 0) launch_layer_norm(call);
  return {output, sum};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                       const Tensor& input, const Tensor& gamma, double epsilon,
                                                       bool need_input, bool need_gamma, bool need_beta) {
  const int64_t width = check_rows("layer_norm_backward", "input", input);
  check_like("layer_norm_backward", "grad", grad, input);
  if (grad_sum) check_like("layer_norm_backward", "grad_sum", *grad_sum, input);
  check_parameter("layer_norm_backward", "gamma", gamma, input, width);
  const Tensor grads = as_contiguous(grad);
  const std::optional<Tensor> sum_grads = as_contiguous(grad_sum);
  const Tensor rows = as_contiguous(input);
  const Tensor weight = as_contiguous(gamma);
  const Tensor grad_input = empty_row_gradient(rows, need_input);
  const Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  const Tensor grad_beta = empty_parameter_gradient(rows, width, need_beta);
  LayerNormBackwardCall call;
  call.grad = &grads;
  call.grad_sum = pointer_to(sum_grads);
  call.input = &rows;
  call.gamma = &weight;
  call.epsilon = epsilon;
  call.grad_input = need_input ? &grad_input : nullptr;
  call.grad_gamma = need_gamma ? &grad_gamma : nullptr;
  call.grad_beta = need_beta ? &grad_beta : nullptr;
  if (need_input || need_gamma || need_beta) launch_layer_norm_backward(call);
  return {grad_input, grad_gamma, grad_beta};
}

}  // namespace rudnn
