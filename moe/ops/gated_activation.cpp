#include "ops/gated_activation.h"

#include <string>

#include "common/check.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

Activation activation_named(const char* op, const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  fail_check(op, "activation", "must be silu, gelu or gelu_tanh, got " + name);
}

// The shape of the output.
std::vector<int64_t> check_halves(const char* op, const Tensor& input) {
  check_float(op, "input", input);
  std::vector<int64_t> shape = shape_of(input);
  if (shape.empty() || shape.back() < 2 || shape.back() % 2 != 0) {
    fail_check(op, "input", "must have a last axis of even length >= 2, got shape " + describe_shape(shape));
  }
  shape.back() /= 2;
  return shape;
}

}  // namespace

Tensor gated_activation(const Tensor& input, const std::string& activation) {
  const std::vector<int64_t> shape = check_halves("gated_activation", input);
  const Tensor rows = as_contiguous(input);
  const Tensor output = new_empty(rows, shape, rows.scalar_type());
  GatedActivationCall call;
  call.input = &rows;
  call.activation = activation_named("gated_activation", activation);
  call.output = &output;
  if (rows.numel() > 0) launch_gated_activation(call);
  return output;
}

Tensor gated_activation_backward(const Tensor& grad, const Tensor& input, const std::string& activation) {
  constexpr const char* kOp = "gated_activation_backward";
  const std::vector<int64_t> shape = check_halves(kOp, input);
  check_dtype(kOp, "grad", grad, input.scalar_type());
  check_shape(kOp, "grad", grad, shape);
  check_same_device(kOp, "grad", grad, input);
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(input);
  const Tensor grad_input = new_empty_like(rows);
  GatedActivationCall call;
  call.input = &rows;
  call.activation = activation_named(kOp, activation);
  call.grad = &grads;
  call.grad_input = &grad_input;
  if (rows.numel() > 0) launch_gated_activation_backward(call);
  return grad_input;
}

}  // namespace rudnn
