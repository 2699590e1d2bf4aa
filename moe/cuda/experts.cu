#include <optional>

#include "cuda/experts.cuh"
#include "cuda/launch.cuh"
#include "ops/combine.h"
#include "ops/dispatch.h"
#include "ops/experts.h"

namespace rudnn {
namespace {

using WideTile = TensorCoreTile<128, 128, 2, 4, 2>;
using NarrowTile = TensorCoreTile<32, 128, 1, 4, 4>;

// Calls visit(TypeTag<T>, Tile): narrow tiles where experts have few rows on average, since they waste less. What a row
// becomes depends on neither.
template <class Visit>
void visit_tile(bool tensor_core, DType dtype, int64_t rows_per_expert, Visit&& visit) {
  visit_dtype(dtype, [&](auto type) {
    if constexpr (sizeof(typename decltype(type)::type) == 2) {
      if (tensor_core && rows_per_expert > NarrowTile::kRows) return visit(type, WideTile{});
      if (tensor_core) return visit(type, NarrowTile{});
    }
    visit(type, ScalarTile{});
  });
}

ExpertMatrices matrices_data(const char* name, const Tensor* weight) {
  return {cuda::input_data(name, weight), weight->stride(0)};
}

// What forward and backward have in common. `activated` is theirs alone.
ExpertsArgs common_args(const Tensor& expert_offsets, const ExpertWeights& weights, const Tensor& activated) {
  ExpertsArgs args{};
  args.groups.expert_offsets = static_cast<const int32_t*>(cuda::input_data("expert_offsets", &expert_offsets));
  args.groups.experts = static_cast<int>(weights.down->size(0));
  args.groups.rows = activated.size(0);
  args.hidden = weights.down->size(1);
  args.intermediate = weights.down->size(2);
  args.gate = matrices_data("gate", weights.gate);
  args.up = matrices_data("up", weights.up);
  args.down = matrices_data("down", weights.down);
  args.activated = cuda::scratch_data("activated", &activated);
  const int64_t element_bytes = activated.element_size();
  args.vectors = is_whole_vectors(args.hidden, element_bytes) && is_whole_vectors(args.intermediate, element_bytes) &&
                 is_whole_vectors(args.gate.stride, element_bytes) && is_whole_vectors(args.up.stride, element_bytes) &&
                 is_whole_vectors(args.down.stride, element_bytes);
  return args;
}

template <class Tile>
LaunchConfig tile_grid(int64_t blocks, Stream stream) {
  return {dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), Tile::kSharedBytes, stream};
}

// Launches a problem whose rows are the dispatched ones; a tile has `tile_columns` of the result's.
template <class T, class Tile, template <class, class> class Problem>
void launch_rows(const ExpertsArgs& args, int64_t columns, int64_t tile_columns, Stream stream) {
  const int64_t blocks = row_tiles<Tile::kRows>(args.groups.rows, args.groups.experts);
  launch(grouped_product<T, Tile, Problem>, tile_grid<Tile>(blocks * ceil_divide(columns, tile_columns), stream), args);
}

// grad = the sum over each expert's rows of left[row]^T right[row].
template <class T, class Tile>
void launch_weight_gradient(const ExpertsArgs& args, const char* name, const Tensor* grad, const void* left,
                            const void* right, Stream stream) {
  WeightGradientArgs gradient;
  gradient.groups = args.groups;
  gradient.rows = grad->size(1);
  gradient.columns = grad->size(2);
  gradient.vectors = args.vectors;
  gradient.left = left;
  gradient.right = right;
  gradient.result = static_cast<float*>(cuda::output_data(name, grad));
  gradient.stride = grad->stride(0);
  const int64_t tiles = ceil_divide(gradient.rows, Tile::kRows) * ceil_divide(gradient.columns, Tile::kColumns);
  launch(grouped_product<T, Tile, WeightGradient>, tile_grid<Tile>(tiles * args.groups.experts, stream), gradient);
}

}  // namespace

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

void launch_experts_backward(const ExpertsBackwardCall& call) {
  cuda::run_on_device(*call.values, [&](Stream stream) {
    const int64_t rows = call.values->size(0);
    const Tensor activated = new_empty_like(*call.gate_projection);
    const Tensor grad_gate_projection = new_empty_like(*call.gate_projection);
    const Tensor grad_up_projection = new_empty_like(*call.gate_projection);
    ExpertsArgs args = common_args(*call.expert_offsets, call.weights, activated);
    args.values = cuda::input_data("values", call.values);
    args.grad = cuda::input_data("grad", call.grad);
    // Read only, though the forward writes them.
    args.gate_projection = const_cast<void*>(cuda::input_data("gate_projection", call.gate_projection));
    args.up_projection = const_cast<void*>(cuda::input_data("up_projection", call.up_projection));
    args.grad_gate_projection = cuda::scratch_data("grad_gate_projection", &grad_gate_projection);
    args.grad_up_projection = cuda::scratch_data("grad_up_projection", &grad_up_projection);
    args.grad_values = cuda::output_data("grad_values", call.grad_values);
    const DType dtype = dtype_of(*call.values);
    if (rows > 0) {
      visit_tile(call.tensor_core, dtype, rows / args.groups.experts, [&](auto type, auto tile) {
        using T = typename decltype(type)::type;
        using Tile = decltype(tile);
        launch_rows<T, Tile, ActivateBackward>(args, args.intermediate, Tile::kColumns, stream);
        if (args.grad_values != nullptr) launch_rows<T, Tile, ValueGradient>(args, args.hidden, Tile::kColumns, stream);
      });
    }
    const ExpertWeights& grads = call.grad_weights;
    if (grads.down == nullptr) return;
    // Their tiles are of weights, which are many however few the rows.
    visit_tile(call.tensor_core, dtype, WideTile::kRows, [&](auto type, auto tile) {
      using T = typename decltype(type)::type;
      using Tile = decltype(tile);
      if constexpr (!std::is_same<Tile, NarrowTile>::value) {
        launch_weight_gradient<T, Tile>(args, "grad_gate", grads.gate, args.grad_gate_projection, args.values, stream);
        launch_weight_gradient<T, Tile>(args, "grad_up", grads.up, args.grad_up_projection, args.values, stream);
        launch_weight_gradient<T, Tile>(args, "grad_down", grads.down, args.grad, args.activated, stream);
      }
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
