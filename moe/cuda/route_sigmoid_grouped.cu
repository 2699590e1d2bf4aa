#include "cuda/launch.cuh"
#include "cuda/route_sigmoid_grouped.cuh"
#include "ops/route_sigmoid_grouped.h"

namespace rudnn {

void launch_route_sigmoid_grouped(const RouteSigmoidGroupedCall& call) {
  cuda::run_on_device(*call.logits, [&](Stream stream) {
    RouteSigmoidGroupedArgs args;
    args.tokens = call.logits->size(0);
    args.experts = static_cast<int>(call.logits->size(1));
    args.top_k = static_cast<int>(call.top_k);
    args.groups = static_cast<int>(call.groups);
    args.selected_groups = static_cast<int>(call.selected_groups);
    args.group_top_two = call.group_top_two;
    args.renormalize = call.renormalize;
    args.scale = call.scale;
    args.logits = cuda::input_data("logits", call.logits);
    args.bias = static_cast<const float*>(cuda::input_data("bias", call.bias));
    args.indices = static_cast<int32_t*>(cuda::output_data("indices", call.indices));
    args.weights = cuda::output_data("weights", call.weights);
    LaunchConfig config = warp_grid(args.tokens, stream);
    config.shared_bytes = kWarpsPerBlock * grouped_ranks_bytes(args.experts, args.groups);
    visit_dtype(dtype_of(*call.logits),
                [&](auto type) { launch(route_sigmoid_grouped<typename decltype(type)::type>, config, args); });
  });
}

}  // namespace rudnn
