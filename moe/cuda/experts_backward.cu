#include "cuda/experts_backward.cuh"
#include "cuda/experts_launch.cuh"

namespace rudnn {
namespace {

// Calls visit(TypeTag<T>, Tile) for gradients of weights: those are many however few the rows, so tiles are wide.
template <class Visit>
void visit_weight_tile(bool tensor_core, DType dtype, Visit&& visit) {
  visit_dtype(dtype, [&](auto type) {
    if constexpr (sizeof(typename decltype(type)::type) == 2) {
      if (tensor_core) return visit(type, WideTile{});
    }
    visit(type, ScalarTile{});
  });
}

// grad = the sum over each expert's rows of left[row]^T right[row].
template <class T, class Tile>
void launch_weight_gradient(const ExpertsArgs& args, const char* name, const Tensor* grad, const void* left,
                            const void* right, Stream stream) {
  if (grad == nullptr) return;
  WeightGradientArgs gradient;
  gradient.groups = args.groups;
  gradient.rows = grad->size(1);
  gradient.columns = grad->size(2);
  gradient.vectors = args.vectors;
  gradient.left = left;
  gradient.right = right;
  gradient.result = cuda::output_data(name, grad);
  gradient.stride = grad->stride(0);
  gradient.rounded = grad->scalar_type() != ScalarType::Float;
  const int64_t tiles = ceil_divide(gradient.rows, Tile::kRows) * ceil_divide(gradient.columns, Tile::kColumns);
  launch(grouped_product<T, Tile, WeightGradient>, tile_grid<Tile>(tiles * args.groups.experts, stream), gradient);
}

}  // namespace

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
    if (grads.gate == nullptr && grads.up == nullptr && grads.down == nullptr) return;
    visit_weight_tile(call.tensor_core, dtype, [&](auto type, auto tile) {
      using T = typename decltype(type)::type;
      using Tile = decltype(tile);
      launch_weight_gradient<T, Tile>(args, "grad_gate", grads.gate, args.grad_gate_projection, args.values, stream);
      launch_weight_gradient<T, Tile>(args, "grad_up", grads.up, args.grad_up_projection, args.values, stream);
      launch_weight_gradient<T, Tile>(args, "grad_down", grads.down, args.grad, args.activated, stream);
    });
  });
}

}  // namespace rudnn
