#include "ops/route.h"

#include "metal/launch.h"
#include "metal/route_args.h"
#include "ops/scoring.h"

namespace rudnn {

void launch_route(const RouteCall& call) {
  metal::run_on_device([&] {
    RouteArgs args;
    args.tokens = call.logits->size(0);
    args.experts = static_cast<int32_t>(call.logits->size(1));
    args.top_k = static_cast<int32_t>(call.top_k);
    args.renormalize_epsilon = kRenormalizeEpsilon;
    metal::Launch(instance_of("route", dtype_of(*call.logits)))
        .bytes(kArgsBuffer, args)
        .constant(kRenormalizeConstant, call.renormalize)
        .buffer(kLogitsBuffer, metal::input_data("logits", call.logits))
        .buffer(kIndicesBuffer, metal::output_data("indices", call.indices))
        .buffer(kWeightsBuffer, metal::output_data("weights", call.weights))
        .run({groups_of(args.tokens, kTokens)}, {kTokenThreads});
  });
}

}  // namespace rudnn
