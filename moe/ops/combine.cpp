#include "ops/combine.h"

#include <tuple>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

// Returns the number of tokens.
int64_t check_rows_of_tokens(const char* op, const Tensor& expert_output, const Tensor& weights,
                             const Tensor& slot_rows) {
  check_float_matrix(op, "expert_output", expert_output);
  check_float_matrix(op, "weights", weights);
  check_same_device(op, "weights", weights, expert_output);
  check_map(op, "slot_rows", slot_rows, shape_of(weights), expert_output);
  check_shape(op, "expert_output", expert_output, {weights.numel(), expert_output.size(1)});
  return weights.size(0);
}

}  // namespace

Tensor combine(const Tensor& expert_output, const Tensor& weights, const Tensor& slot_rows) {
  const int64_t tokens = check_rows_of_tokens("combine", expert_output, weights, slot_rows);
  const Tensor rows = as_contiguous(expert_output);
  const Tensor factors = as_contiguous(weights);
  const Tensor map = as_contiguous(slot_rows);
  const Tensor output = new_empty(rows, {tokens, rows.size(1)}, rows.scalar_type());
  CombineCall call;
  call.expert_output = &rows;
  call.weights = &factors;
  call.slot_rows = &map;
  call.output = &output;
  if (output.numel() > 0) launch_combine(call);
  return output;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad, const Tensor& expert_output, const Tensor& weights,
                                            const Tensor& row_slots, const Tensor& slot_rows, bool plane,
                                            bool need_expert_output, bool need_weights) {
  constexpr const char* kOp = "combine_backward";
  const int64_t tokens = check_rows_of_tokens(kOp, expert_output, weights, slot_rows);
  check_map(kOp, "row_slots", row_slots, {slot_rows.numel()}, expert_output);
  check_dtype(kOp, "grad", grad, expert_output.scalar_type());
  check_shape(kOp, "grad", grad, {tokens, expert_output.size(1)});
  check_same_device(kOp, "grad", grad, expert_output);
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(expert_output);
  const Tensor factors = as_contiguous(weights);
  const Tensor slots = as_contiguous(row_slots);
  const Tensor map = as_contiguous(slot_rows);
  const auto shape_if = [](bool needed, const Tensor& like) {
    return needed ? shape_of(like) : std::vector<int64_t>{0};
  };
  const Tensor grad_expert_output = new_empty(rows, shape_if(need_expert_output, rows), rows.scalar_type());
  const Tensor grad_weights = new_empty(rows, shape_if(need_weights, factors), ScalarType::Float);
  CombineBackwardCall call;
  call.grad = &grads;
  call.expert_output = &rows;
  call.weights = &factors;
  call.row_slots = &slots;
  call.slot_rows = &map;
  call.plane = plane;
  call.grad_expert_output = need_expert_output ? &grad_expert_output : nullptr;
  call.grad_weights = need_weights ? &grad_weights : nullptr;
  if (map.numel() > 0 && (need_expert_output || need_weights)) launch_combine_backward(call);
  return {grad_expert_output, grad_weights};
}

}  // namespace rudnn
