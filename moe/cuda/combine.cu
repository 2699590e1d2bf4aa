#include "cuda/combine.cuh"
#include "cuda/launch.cuh"
#include "ops/combine.h"

namespace rudnn {

void launch_combine(const CombineCall& call) {
  cuda::run_on_device(*call.expert_output, [&](Stream stream) {
    CombineArgs args;
    args.tokens = call.slot_rows->size(0);
    args.rows = call.expert_output->size(0);
    args.width = call.expert_output->size(1);
    args.top_k = call.slot_rows->size(1);
    args.slot_rows = static_cast<const int32_t*>(cuda::input_data("slot_rows", call.slot_rows));
    args.weights = factors_data("weights", call.weights);
    args.row_values = cuda::input_data("expert_output", call.expert_output);
    args.output = cuda::output_data("output", call.output);
    visit_vectors(dtype_of(*call.expert_output), args.width, [&](auto type, auto vector) {
      launch(sum_slots<typename decltype(type)::type, vector()>, piece_grid<vector()>(args.tokens, args.width, stream),
             args);
    });
  });
}

void launch_combine_backward(const CombineBackwardCall& call) {
  cuda::run_on_device(*call.expert_output, [&](Stream stream) {
    CombineBackwardArgs args;
    args.tokens = call.slot_rows->size(0);
    args.rows = call.expert_output->size(0);
    args.width = call.expert_output->size(1);
    args.top_k = call.slot_rows->size(1);
    args.row_slots = static_cast<const int32_t*>(cuda::input_data("row_slots", call.row_slots));
    args.slot_rows = static_cast<const int32_t*>(cuda::input_data("slot_rows", call.slot_rows));
    args.weights = factors_data("weights", call.weights);
    args.grad = cuda::input_data("grad", call.grad);
    args.row_values = cuda::input_data("expert_output", call.expert_output);
    args.grad_row_values = cuda::output_data("grad_expert_output", call.grad_expert_output);
    args.grad_weights = static_cast<float*>(cuda::output_data("grad_weights", call.grad_weights));
    const int64_t weights = args.tokens * args.top_k;
    visit_vectors(dtype_of(*call.expert_output), args.width, [&](auto type, auto vector) {
      using T = typename decltype(type)::type;
      if (args.grad_row_values != nullptr && args.rows * args.width > 0)
        launch(spread_gradient<T, vector()>, piece_grid<vector()>(args.rows, args.width, stream), args);
      if (args.grad_weights == nullptr) return;
      if (call.plane)
        launch(weight_gradients<T, vector(), kWarpSize>, warp_grid(weights, stream), args);
      else
        launch(weight_gradients<T, vector(), 1>, warp_grid(ceil_divide(weights, kWarpSize), stream), args);
    });
  });
}

}  // namespace rudnn
