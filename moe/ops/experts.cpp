#include "ops/experts.h"

#include <tuple>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

// The tensor itself if its matrices are contiguous, however far apart they lie, else a contiguous copy.
Tensor with_contiguous_matrices(const Tensor& tensor) {
  const bool packed = tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2);
  return packed && is_aligned(tensor) ? tensor : contiguous_copy(tensor);
}

// Weights as the launchers want them, and what keeps them alive.
struct CheckedWeights {
  Tensor gate, up, down;

  ExpertWeights view() const { return {&gate, &up, &down}; }
  int64_t experts() const { return down.size(0); }
  int64_t hidden() const { return down.size(1); }
  int64_t intermediate() const { return down.size(2); }
};

CheckedWeights check_weights(const char* op, const Tensor& gate, const std::optional<Tensor>& up, const Tensor& down,
                             bool tensor_core) {
  check_float(op, "down", down);
  check_dim(op, "down", down, 3);
  const int64_t experts = down.size(0), hidden = down.size(1), intermediate = down.size(2);
  if (experts < 1 || hidden < 1 || intermediate < 1) {
    fail_check(op, "down", "must not be empty, got shape " + describe_shape(shape_of(down)));
  }
  check_dtype(op, "gate", gate, down.scalar_type());
  check_shape(op, "gate", gate, {experts, up ? intermediate : 2 * intermediate, hidden});
  check_same_device(op, "gate", gate, down);
  if (up) check_like(op, "up", *up, gate);
  if (tensor_core && !has_tensor_core(dtype_of(down))) {
    fail_check(op, "tensor_core",
               std::string("must be false: this hardware has no matrix units for ") + dtype_name(down.scalar_type()) +
                   ", got true");
  }
  if (up) return {with_contiguous_matrices(gate), with_contiguous_matrices(*up), with_contiguous_matrices(down)};
  const Tensor both = with_contiguous_matrices(gate);
  return {narrow(both, 1, 0, intermediate), narrow(both, 1, intermediate, intermediate),
          with_contiguous_matrices(down)};
}

void check_rows_of_experts(const char* op, const char* argument, const Tensor& rows, const CheckedWeights& weights) {
  check_dtype(op, argument, rows, weights.down.scalar_type());
  check_dim(op, argument, rows, 2);
  check_shape(op, argument, rows, {rows.size(0), weights.hidden()});
  check_same_device(op, argument, rows, weights.down);
}

Tensor empty_projection(const Tensor& values, const CheckedWeights& weights) {
  return new_empty(values, {values.size(0), weights.intermediate()}, values.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> run_experts(const char* op, const Tensor& values, const Tensor& expert_offsets,
                                               const Tensor& gate, const std::optional<Tensor>& up, const Tensor& down,
                                               bool tensor_core, bool training) {
  const CheckedWeights weights = check_weights(op, gate, up, down, tensor_core);
  check_rows_of_experts(op, "values", values, weights);
  check_map(op, "expert_offsets", expert_offsets, {weights.experts() + 1}, values);
  const Tensor rows = as_contiguous(values);
  const Tensor offsets = as_contiguous(expert_offsets);
  const Tensor output = new_empty_like(rows);
  ExpertsCall call;
  call.tensor_core = tensor_core;
  call.values = &rows;
  call.expert_offsets = &offsets;
  call.weights = weights.view();
  call.output = &output;
  if (!training) {
    if (rows.size(0) > 0) launch_experts(call);
    return {output, output, output};
  }
  const Tensor gate_projection = empty_projection(rows, weights);
  const Tensor up_projection = empty_projection(rows, weights);
  call.gate_projection = &gate_projection;
  call.up_projection = &up_projection;
  if (rows.size(0) > 0) launch_experts(call);
  return {output, gate_projection, up_projection};
}

}  // namespace

Tensor experts(const Tensor& values, const Tensor& expert_offsets, const Tensor& gate, const std::optional<Tensor>& up,
               const Tensor& down, bool tensor_core) {
  return std::get<0>(run_experts("experts", values, expert_offsets, gate, up, down, tensor_core, false));
}

std::tuple<Tensor, Tensor, Tensor> experts_training(const Tensor& values, const Tensor& expert_offsets,
                                                    const Tensor& gate, const std::optional<Tensor>& up,
                                                    const Tensor& down, bool tensor_core) {
  return run_experts("experts_training", values, expert_offsets, gate, up, down, tensor_core, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> experts_backward(const Tensor& grad, const Tensor& values,
                                                            const Tensor& expert_offsets, const Tensor& gate,
                                                            const std::optional<Tensor>& up, const Tensor& down,
                                                            const Tensor& gate_projection, const Tensor& up_projection,
                                                            bool tensor_core, bool float32_weights, bool need_values,
                                                            bool need_gate, bool need_up, bool need_down) {
  constexpr const char* kOp = "experts_backward";
  const CheckedWeights weights = check_weights(kOp, gate, up, down, tensor_core);
  check_rows_of_experts(kOp, "values", values, weights);
  check_like(kOp, "grad", grad, values);
  check_map(kOp, "expert_offsets", expert_offsets, {weights.experts() + 1}, values);
  for (const auto& [name, projection] :
       {std::pair{"gate_projection", &gate_projection}, std::pair{"up_projection", &up_projection}}) {
    check_dtype(kOp, name, *projection, values.scalar_type());
    check_shape(kOp, name, *projection, {values.size(0), weights.intermediate()});
    check_same_device(kOp, name, *projection, values);
  }
  const Tensor grads = as_contiguous(grad);
  const Tensor rows = as_contiguous(values);
  const Tensor offsets = as_contiguous(expert_offsets);
  const Tensor gates = as_contiguous(gate_projection);
  const Tensor ups = as_contiguous(up_projection);

  const ScalarType gradient_type = float32_weights ? ScalarType::Float : rows.scalar_type();
  const auto empty_gradient = [&](bool needed, const Tensor& weight) {
    return new_empty(rows, needed ? shape_of(weight) : std::vector<int64_t>{0}, gradient_type);
  };
  const Tensor grad_values =
      new_empty(rows, need_values ? shape_of(rows) : std::vector<int64_t>{0}, rows.scalar_type());
  const Tensor grad_gate = empty_gradient(need_gate, gate);
  const Tensor grad_up = empty_gradient(need_up && up, up.value_or(gate));
  const Tensor grad_down = empty_gradient(need_down, down);

  ExpertsBackwardCall call;
  call.tensor_core = tensor_core;
  call.grad = &grads;
  call.values = &rows;
  call.expert_offsets = &offsets;
  call.weights = weights.view();
  call.gate_projection = &gates;
  call.up_projection = &ups;
  call.grad_values = need_values ? &grad_values : nullptr;
  const int64_t intermediate = weights.intermediate();
  // The halves of what holds both; views of nothing where nobody needs it.
  const bool halves = need_gate && !up;
  const Tensor gate_part = halves ? narrow(grad_gate, 1, 0, intermediate) : grad_gate;
  const Tensor up_part = halves ? narrow(grad_gate, 1, intermediate, intermediate) : grad_up;
  if (need_gate) call.grad_weights.gate = &gate_part;
  if (halves || (need_up && up)) call.grad_weights.up = &up_part;
  if (need_down) call.grad_weights.down = &grad_down;
  const bool need_weights = need_gate || need_down || call.grad_weights.up;
  if (need_weights || (need_values && rows.size(0) > 0)) launch_experts_backward(call);
  return {grad_values, grad_gate, grad_up, grad_down};
}

Tensor fused_experts(const Tensor& input, const Tensor& indices, const Tensor& weights, const Tensor& gate,
                     const std::optional<Tensor>& up, const Tensor& down, bool tensor_core) {
  constexpr const char* kOp = "fused_experts";
  const CheckedWeights expert_weights = check_weights(kOp, gate, up, down, tensor_core);
  check_rows_of_experts(kOp, "input", input, expert_weights);
  check_indices(kOp, "indices", indices, input);
  check_at_least(kOp, "the experts of a token", indices.size(1), 1);
  check_shape(kOp, "indices", indices, {input.size(0), indices.size(1)});
  check_row_count(kOp, "indices", indices);
  check_float_matrix(kOp, "weights", weights);
  check_shape(kOp, "weights", weights, shape_of(indices));
  check_same_device(kOp, "weights", weights, input);
  const Tensor tokens = as_contiguous(input);
  const Tensor chosen = as_contiguous(indices);
  const Tensor factors = as_contiguous(weights);
  const Tensor output = new_empty_like(tokens);
  FusedExpertsCall call;
  call.tensor_core = tensor_core;
  call.input = &tokens;
  call.indices = &chosen;
  call.weights = &factors;
  call.expert_weights = expert_weights.view();
  call.output = &output;
  if (tokens.size(0) > 0) launch_fused_experts(call);
  return output;
}

std::string tensor_core_dtypes() {
  std::string names;
  if (has_tensor_core(DType::kFloat16)) names += "float16";
  if (has_tensor_core(DType::kBFloat16)) names += names.empty() ? "bfloat16" : ",bfloat16";
  return names;
}

}  // namespace rudnn
