#include "ops/dispatch.h"

#include <limits>
#include <tuple>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dispatch(const Tensor& input, const Tensor& indices,
                                                                    int64_t experts) {
  constexpr const char* kOp = "dispatch";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check_float_matrix(kOp, "input", input);
  check_indices(kOp, "indices", indices, input);
  check_at_least(kOp, "the experts of a token", indices.size(1), 1);
  check_shape(kOp, "indices", indices, {input.size(0), indices.size(1)});
  check_at_most(kOp, "experts", experts, kMost - 1);
  const int64_t rows = indices.numel();
  check_row_count(kOp, "indices", indices);
  const Tensor tokens = as_contiguous(input);
  const Tensor chosen = as_contiguous(indices);
  const Tensor values = new_empty(tokens, {rows, tokens.size(1)}, tokens.scalar_type());
  const Tensor expert_offsets = new_empty(tokens, {experts + 1}, ScalarType::Int);
  const Tensor row_experts = new_empty(tokens, {rows}, ScalarType::Int);
  const Tensor row_tokens = new_empty(tokens, {rows}, ScalarType::Int);
  const Tensor row_slots = new_empty(tokens, {rows}, ScalarType::Int);
  const Tensor slot_rows = new_empty(tokens, shape_of(chosen), ScalarType::Int);
  DispatchCall call;
  call.input = &tokens;
  call.indices = &chosen;
  call.map = {&expert_offsets, &row_experts, &row_tokens, &row_slots, &slot_rows};
  call.values = &values;
  launch_dispatch(call);
  return {values, expert_offsets, row_experts, row_tokens, row_slots, slot_rows};
}

Tensor dispatch_backward(const Tensor& grad_values, const Tensor& slot_rows) {
  constexpr const char* kOp = "dispatch_backward";
  check_float_matrix(kOp, "grad_values", grad_values);
  check_dim(kOp, "slot_rows", slot_rows, 2);
  check_map(kOp, "slot_rows", slot_rows, shape_of(slot_rows), grad_values);
  check_shape(kOp, "grad_values", grad_values, {slot_rows.numel(), grad_values.size(1)});
  const Tensor grads = as_contiguous(grad_values);
  const Tensor map = as_contiguous(slot_rows);
  const Tensor grad_input = new_empty(grads, {map.size(0), grads.size(1)}, grads.scalar_type());
  DispatchBackwardCall call;
  call.grad_values = &grads;
  call.slot_rows = &map;
  call.grad_input = &grad_input;
  if (grad_input.numel() > 0) launch_dispatch_backward(call);
  return grad_input;
}

}  // namespace rudnn
