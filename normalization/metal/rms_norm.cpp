#include "ops/rms_norm.h"

#include "metal/norm_launch.h"

namespace rudnn {
namespace {

// What both directions have beside other norms.
template <class Call>
void bind(metal::Launch& launch, const Call& call) {
  launch.constant(kZeroCenteredConstant, call.zero_centered)
      .constant(kGatedConstant, call.gate != nullptr)
      .constant(kSigmoidConstant, call.activation == GateActivation::kSigmoid)
      .buffer(kGateBuffer, metal::input_data("gate", call.gate));
}

}  // namespace

void launch_rms_norm(const RmsNormCall& call) {
  metal::run_on_device([&] {
    const RowPlan plan = plan_forward(call);
    metal::Launch launch = forward_launch("rms_norm", call, plan);
    bind(launch, call);
    run_rows(launch, plan);
  });
}

void launch_rms_norm_backward(const RmsNormBackwardCall& call) {
  if (call.input->numel() == 0) return zero(call.grad_gamma);
  metal::run_on_device([&] {
    const RowPlan plan = plan_backward(call, call.grad_gamma != nullptr);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, plan);
    metal::Launch launch = backward_launch("rms_norm_backward", call, plan, gamma_partials);
    bind(launch, call);
    launch.constant(kWantsGateConstant, call.grad_gate != nullptr)
        .buffer(kGradGateBuffer, metal::output_data("grad_gate", call.grad_gate));
    run_rows(launch, plan);
    gamma_partials.sum();
  });
}

}  // namespace rudnn
