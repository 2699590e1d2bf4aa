#include "ops/softmax_last_axis.h"

#include "ops/row_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {

Tensor softmax_last_axis(const Tensor& input) {
  check_rows("softmax_last_axis", "input", input);
  const Tensor rows = as_contiguous(input);
  Tensor output = new_empty_like(rows);
  if (rows.numel() > 0) launch_softmax_last_axis(rows, output);
  return output;
}

Tensor softmax_last_axis_backward(const Tensor& grad, const Tensor& output) {
  check_rows("softmax_last_axis_backward", "output", output);
  check_like("softmax_last_axis_backward", "grad", grad, output);
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(output);
  Tensor grad_input = new_empty_like(rows);
  if (rows.numel() > 0) launch_softmax_last_axis_backward(grads, rows, grad_input);
  return grad_input;
}

}  // namespace rudnn
