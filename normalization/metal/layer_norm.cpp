#include "ops/layer_norm.h"

#include "metal/launch.h"
#include "metal/layer_norm_args.h"

namespace rudnn {
namespace {

template <class Call>
LayerNormArgs args_of(const Call& call) {
  LayerNormArgs args;
  args.width = call.gamma->numel();
  args.rows = call.input->numel() / args.width;
  args.epsilon = static_cast<float>(call.epsilon);
  args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
  return args;
}

}  // namespace

void launch_layer_norm(const LayerNormCall& call) {
  metal::run_on_device([&] {
    const metal::Memory gamma = metal::input_data("gamma", call.gamma);
    const metal::Memory beta = metal::input_data("beta", call.beta);
    const metal::Memory input = metal::input_data("input", call.input);
    const metal::Memory residual = metal::input_data("residual", call.residual);
    const metal::Memory output = metal::output_data("output", call.output);
    const metal::Memory sum = metal::output_data("sum", call.sum);
    const LayerNormArgs args = args_of(call);
    const RowPlan plan = plan_rows(args.rows, args.width, kForwardBudget);
    metal::Launch launch(instance_of("layer_norm", dtype_of(*call.input), plan));
    launch.constant(kGammaIsFloatConstant, is_float32(call.gamma))
        .constant(kHasBetaConstant, call.beta != nullptr)
        .constant(kBetaIsFloatConstant, is_float32(call.beta))
        .constant(kAddsResidualConstant, call.residual != nullptr)
        .bytes(kArgsBuffer, args)
        .buffer(kGammaBuffer, gamma)
        .buffer(kBetaBuffer, beta)
        .buffer(kInputBuffer, input)
        .buffer(kResidualBuffer, residual)
        .buffer(kOutputBuffer, output)
        .buffer(kSumBuffer, sum);
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
    const metal::Memory gamma = metal::input_data("gamma", call.gamma);
    const metal::Memory grad = metal::input_data("grad", call.grad);
    const metal::Memory grad_sum = metal::input_data("grad_sum", call.grad_sum);
    const metal::Memory input = metal::input_data("input", call.input);
    const metal::Memory grad_input = metal::output_data("grad_input", call.grad_input);
    const LayerNormArgs args = args_of(call);
    const auto plan_of = call.grad_gamma != nullptr || call.grad_beta != nullptr ? plan_summed_rows : plan_rows;
    const RowPlan plan = plan_of(args.rows, args.width, kBackwardBudget);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, *call.input, plan, args.width);
    const Partials beta_partials("grad_beta", call.grad_beta, *call.input, plan, args.width);
    metal::Launch launch(instance_of("layer_norm_backward", dtype_of(*call.input), plan));
    launch.constant(kGammaIsFloatConstant, is_float32(call.gamma))
        .constant(kAddsGradSumConstant, call.grad_sum != nullptr)
        .constant(kWantsInputConstant, call.grad_input != nullptr)
        .constant(kWantsGammaConstant, call.grad_gamma != nullptr)
        .constant(kWantsBetaConstant, call.grad_beta != nullptr)
        .bytes(kArgsBuffer, args)
        .buffer(kGammaBuffer, gamma)
        .buffer(kGradBuffer, grad)
        .buffer(kGradSumBuffer, grad_sum)
        .buffer(kInputBuffer, input)
        .buffer(kGradInputBuffer, grad_input)
        .buffer(kGammaPartialsBuffer, gamma_partials.memory())
        .buffer(kBetaPartialsBuffer, beta_partials.memory());
    run_rows(launch, plan);
    gamma_partials.sum();
    beta_partials.sum();
  });
}

}  // namespace rudnn
