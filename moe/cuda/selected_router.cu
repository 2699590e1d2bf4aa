#include "cuda/launch.cuh"
#include "cuda/selected_router.cuh"
#include "ops/selected_router.h"

namespace rudnn {
namespace {

SelectedRouterArgs common_args(const SelectedRouterCall& call) {
  SelectedRouterArgs args{};
  args.tokens = call.logits->size(0);
  args.experts = static_cast<int>(call.logits->size(1));
  args.top_k = static_cast<int>(call.indices->size(1));
  args.scoring = call.scoring;
  args.renormalize = call.renormalize;
  args.scale = call.scale;
  args.logits = cuda::input_data("logits", call.logits);
  args.indices = indices_data("indices", call.indices);
  return args;
}

}  // namespace

void launch_selected_router_weights(const SelectedRouterCall& call) {
  cuda::run_on_device(*call.logits, [&](Stream stream) {
    SelectedRouterArgs args = common_args(call);
    args.weights = static_cast<float*>(cuda::output_data("weights", call.weights));
    visit_dtype(dtype_of(*call.logits), [&](auto type) {
      launch(selected_router_weights<typename decltype(type)::type>, warp_grid(args.tokens, stream), args);
    });
  });
}

void launch_selected_router_backward(const SelectedRouterCall& call) {
  cuda::run_on_device(*call.logits, [&](Stream stream) {
    SelectedRouterArgs args = common_args(call);
    args.grad_weights = static_cast<const float*>(cuda::input_data("grad_weights", call.grad_weights));
    args.grad_logits = cuda::output_data("grad_logits", call.grad_logits);
    visit_dtype(dtype_of(*call.logits), [&](auto type) {
      launch(selected_router_backward<typename decltype(type)::type>, warp_grid(args.tokens, stream), args);
    });
  });
}

}  // namespace rudnn
