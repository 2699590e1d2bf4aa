#include "ops/gated_activation.h"

#include "metal/gated_activation_args.h"
#include "metal/launch.h"

namespace rudnn {
namespace {

// A launch over the elements of the output, which the caller runs with the plan.
metal::Launch launch_of(const char* kernel, const GatedActivationCall& call, MatrixPlan& plan) {
  GatedActivationArgs args;
  args.width = call.input->size(-1) / 2;
  args.rows = call.input->numel() / (2 * args.width);
  const DType dtype = dtype_of(*call.input);
  plan = plan_matrix(args.rows, args.width, has_aligned_rows(args.width, dtype));
  metal::Launch launch(instance_of(kernel, dtype) + plan.suffix);
  launch.bytes(kArgsBuffer, args).constant(kActivationConstant, static_cast<int32_t>(call.activation));
  return launch;
}

}  // namespace

void launch_gated_activation(const GatedActivationCall& call) {
  metal::run_on_device([&] {
    MatrixPlan plan;
    metal::Launch launch = launch_of("gated_activation", call, plan);
    launch.buffer(kInputBuffer, metal::input_data("input", call.input))
        .buffer(kOutputBuffer, metal::output_data("output", call.output))
        .run(plan.groups, plan.threads);
  });
}

void launch_gated_activation_backward(const GatedActivationCall& call) {
  metal::run_on_device([&] {
    MatrixPlan plan;
    metal::Launch launch = launch_of("gated_activation_backward", call, plan);
    launch.buffer(kInputBuffer, metal::input_data("input", call.input))
        .buffer(kGradBuffer, metal::input_data("grad", call.grad))
        .buffer(kGradInputBuffer, metal::output_data("grad_input", call.grad_input))
        .run(plan.groups, plan.threads);
  });
}

}  // namespace rudnn
