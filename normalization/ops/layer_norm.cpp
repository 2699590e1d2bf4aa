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
  const Tensor scale = as_contiguous(gamma);
  const std::optional<Tensor> shift = as_contiguous(beta);
  Tensor output = new_empty_like(rows);
  if (rows.numel() > 0) {
    launch_layer_norm({&rows, nullptr, &scale, pointer_to(shift), epsilon, &output, nullptr});
  }
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
  const Tensor scale = as_contiguous(gamma);
  const std::optional<Tensor> shift = as_contiguous(beta);
  Tensor output = new_empty_like(rows);
  Tensor sum = new_empty_like(rows);
  if (rows.numel() > 0) {
    launch_layer_norm({&rows, &residuals, &scale, pointer_to(shift), epsilon, &output, &sum});
  }
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
  const Tensor scale = as_contiguous(gamma);
  Tensor grad_input = empty_gradient_like(rows, need_input);
  Tensor grad_gamma = empty_parameter_gradient(rows, width, need_gamma);
  Tensor grad_beta = empty_parameter_gradient(rows, width, need_beta);
  if (need_input || need_gamma || need_beta) {
    launch_layer_norm_backward({&grads, pointer_to(sum_grads), &rows, &scale, epsilon,
                                if_needed(grad_input, need_input), if_needed(grad_gamma, need_gamma),
                                if_needed(grad_beta, need_beta)});
  }
  return {grad_input, grad_gamma, grad_beta};
}

}  // namespace rudnn
