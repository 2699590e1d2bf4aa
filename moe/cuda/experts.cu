#include "cuda/experts_launch.cuh"
#include "ops/combine.h"
#include "ops/dispatch.h"
#include "ops/experts.h"

namespace rudnn {

void launch_experts(const ExpertsCall& call) {
  cuda::run_on_device(*call.values, [&](Stream stream) {
    const int64_t rows = call.values->size(0), intermediate = call.weights.down->size(2);
    const Tensor activated = new_empty(*call.values, {rows, intermediate}, call.values->scalar_type());
    ExpertsArgs args = common_args(*call.expert_offsets, call.weights, activated);
    args.values = cuda::input_data("values", call.values);
    args.output = cuda::output_data("output", call.output);
    args.gate_projection = cuda::output_data("gate_projection", call.gate_projection);
    args.up_projection = cuda::output_data("up_projection", call.up_projection);
    visit_tile(call.tensor_core, dtype_of(*call.values), rows / args.groups.experts, [&](auto type, auto tile) {
      using T = typename decltype(type)::type;
      using Tile = decltype(tile);
      launch_rows<T, Tile, Activate>(args, args.intermediate, Tile::kColumns / 2, stream);
      launch_rows<T, Tile, ProjectDown>(args, args.hidden, Tile::kColumns, stream);
    });
  });
}

void launch_fused_experts(const FusedExpertsCall& call) {
  const Tensor &input = *call.input, &indices = *call.indices;
  const int64_t rows = indices.numel(), hidden = input.size(1), experts = call.expert_weights.down->size(0);
  const auto map = [&](std::vector<int64_t> shape) { return new_empty(input, shape, ScalarType::Int); };
  const Tensor expert_offsets = map({experts + 1}), row_experts = map({rows}), row_tokens = map({rows});
  const Tensor row_slots = map({rows}), slot_rows = map(shape_of(indices));
  const Tensor values = new_empty(input, {rows, hidden}, input.scalar_type());
  DispatchCall dispatch;
  dispatch.input = &input;
  dispatch.indices = &indices;
  dispatch.map = {&expert_offsets, &row_experts, &row_tokens, &row_slots, &slot_rows};
  dispatch.values = &values;
  launch_dispatch(dispatch);

  const Tensor expert_output = new_empty_like(values);
  ExpertsCall product;
  product.tensor_core = call.tensor_core;
  product.values = &values;
  product.expert_offsets = &expert_offsets;
  product.weights = call.expert_weights;
  product.output = &expert_output;
  launch_experts(product);

  CombineCall combine;
  combine.expert_output = &expert_output;
  combine.weights = call.weights;
  combine.slot_rows = &slot_rows;
  combine.output = call.output;
  launch_combine(combine);
}

// Every device that the kernels are compiled for, from capability 8.0 on, multiplies both.
bool has_tensor_core(DType dtype) { return dtype != DType::kFloat32; }

}  // namespace rudnn
