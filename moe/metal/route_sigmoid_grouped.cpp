#include "ops/route_sigmoid_grouped.h"

#include "metal/launch.h"
#include "metal/route_sigmoid_grouped_args.h"
#include "ops/scoring.h"

namespace rudnn {

void launch_route_sigmoid_grouped(const RouteSigmoidGroupedCall& call) {
  metal::run_on_device([&] {
    RouteSigmoidGroupedArgs args;
    args.tokens = call.logits->size(0);
    args.experts = static_cast<int32_t>(call.logits->size(1));
    args.top_k = static_cast<int32_t>(call.top_k);
    args.groups = static_cast<int32_t>(call.groups);
    args.selected_groups = static_cast<int32_t>(call.selected_groups);
    args.scale = call.scale;
    args.renormalize_epsilon = kRenormalizeEpsilon;
    metal::Launch(instance_of("route_sigmoid_grouped", dtype_of(*call.logits)))
        .bytes(kArgsBuffer, args)
        .constant(kHasBiasConstant, call.bias != nullptr)
        .constant(kGroupTopTwoConstant, call.group_top_two)
        .constant(kRenormalizeConstant, call.renormalize)
        .buffer(kLogitsBuffer, metal::input_data("logits", call.logits))
        .buffer(kBiasBuffer, metal::input_data("bias", call.bias))
        .buffer(kIndicesBuffer, metal::output_data("indices", call.indices))
        .buffer(kWeightsBuffer, metal::output_data("weights", call.weights))
        .run({groups_of(args.tokens, kTokens)}, {kTokenThreads});
  });
}

}  // namespace rudnn
