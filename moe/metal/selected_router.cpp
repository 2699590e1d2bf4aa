#include "ops/selected_router.h"

#include "metal/launch.h"
#include "metal/selected_router_args.h"

namespace rudnn {

namespace {

// A launch of a simdgroup for each token, without what the direction adds.
metal::Launch launch_of(const char* kernel, const SelectedRouterCall& call) {
  SelectedRouterArgs args;
  args.tokens = call.logits->size(0);
  args.experts = static_cast<int32_t>(call.logits->size(1));
  args.choices = static_cast<int32_t>(call.indices->size(1));
  args.scale = call.scale;
  args.renormalize_epsilon = kRenormalizeEpsilon;
  metal::Launch launch(instance_of(kernel, dtype_of(*call.logits)));
  launch.bytes(kArgsBuffer, args)
      .constant(kLongIndicesConstant, is_long(*call.indices))
      .constant(kSigmoidConstant, call.scoring == RouterScoring::kSigmoid)
      .constant(kRenormalizeConstant, call.renormalize)
      .buffer(kLogitsBuffer, metal::input_data("logits", call.logits))
      .buffer(kIndicesBuffer, metal::input_data("indices", call.indices));
  return launch;
}

void run(const metal::Launch& launch, const SelectedRouterCall& call) {
  launch.run({groups_of(call.logits->size(0), kTokens)}, {kTokenThreads});
}

}  // namespace

void launch_selected_router_weights(const SelectedRouterCall& call) {
  metal::run_on_device([&] {
    metal::Launch launch = launch_of("selected_router_weights", call);
    launch.buffer(kWeightsBuffer, metal::output_data("weights", call.weights));
    run(launch, call);
  });
}

void launch_selected_router_backward(const SelectedRouterCall& call) {
  metal::run_on_device([&] {
    metal::Launch launch = launch_of("selected_router_backward", call);
    launch.buffer(kGradWeightsBuffer, metal::input_data("grad_weights", call.grad_weights))
        .buffer(kGradLogitsBuffer, metal::output_data("grad_logits", call.grad_logits));
    run(launch, call);
  });
}

}  // namespace rudnn
