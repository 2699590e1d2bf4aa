#include "ops/layer_norm.h"

#include "metal/norm_launch.h"

namespace rudnn {

void launch_layer_norm(const LayerNormCall& call) {
  metal::run_on_device([&] {
    const RowPlan plan = plan_forward(call);
    metal::Launch launch = forward_launch("layer_norm", call, plan);
    launch.constant(kHasBetaConstant, call.beta != nullptr)
        .constant(kBetaIsFloatConstant, is_float32(call.beta))
        .buffer(kBetaBuffer, metal::input_data("beta", call.beta));
    run_rows(launch, plan);
  });
}

void launch_layer_norm_backward(const LayerNormBackwardCall& call) {
  if (call.input->numel() == 0) {
    zero(call.grad_gamma);
    zero(call.grad_beta);
    return;
  }
  metal::run_on_device([&] {
    const RowPlan plan = plan_backward(call, call.grad_gamma != nullptr || call.grad_beta != nullptr);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, plan);
    const Partials beta_partials("grad_beta", call.grad_beta, plan);
    metal::Launch launch = backward_launch("layer_norm_backward", call, plan, gamma_partials);
    launch.constant(kWantsBetaConstant, call.grad_beta != nullptr).buffer(kBetaPartialsBuffer, beta_partials.memory());
    run_rows(launch, plan);
    gamma_partials.sum();
    beta_partials.sum();
  });
}

}  // namespace rudnn
