#include "ops/rms_norm.h"

#include "metal/launch.h"
#include "metal/rms_norm_args.h"

namespace rudnn {
namespace {

template <class Call>
RmsNormArgs args_of(const Call& call) {
  RmsNormArgs args;
  args.width = call.gamma->numel();
  args.rows = call.input->numel() / args.width;
  args.epsilon = static_cast<float>(call.epsilon);
  args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
  args.gamma_offset = call.zero_centered ? 1.0f : 0.0f;
  return args;
}

// The function constants that both directions have.
template <class Call>
metal::Launch launch_of(const std::string& kernel, const Call& call) {
  metal::Launch launch(kernel);
  launch.bytes(kArgsBuffer, args_of(call))
      .constant(kGammaIsFloatConstant, is_float32(call.gamma))
      .constant(kGatedConstant, call.gate != nullptr)
      .constant(kSigmoidConstant, call.activation == GateActivation::kSigmoid);
  return launch;
}

}  // namespace

void launch_rms_norm(const RmsNormCall& call) {
  metal::run_on_device([&] {
    const metal::Memory gamma = metal::input_data("gamma", call.gamma);
    const metal::Memory input = metal::input_data("input", call.input);
    const metal::Memory residual = metal::input_data("residual", call.residual);
    const metal::Memory gate = metal::input_data("gate", call.gate);
    const metal::Memory output = metal::output_data("output", call.output);
    const metal::Memory sum = metal::output_data("sum", call.sum);
    const RmsNormArgs args = args_of(call);
    const RowPlan plan = plan_rows(args.rows, args.width, kForwardBudget);
    metal::Launch launch = launch_of(instance_of("rms_norm", dtype_of(*call.input), plan), call);
    launch.constant(kAddsResidualConstant, call.residual != nullptr)
        .buffer(kGammaBuffer, gamma)
        .buffer(kInputBuffer, input)
        .buffer(kResidualBuffer, residual)
        .buffer(kGateBuffer, gate)
        .buffer(kOutputBuffer, output)
        .buffer(kSumBuffer, sum);
    run_rows(launch, plan);
  });
}

void launch_rms_norm_backward(const RmsNormBackwardCall& call) {
  if (call.input->numel() == 0) return zero(call.grad_gamma);
  metal::run_on_device([&] {
    const metal::Memory gamma = metal::input_data("gamma", call.gamma);
    const metal::Memory grad = metal::input_data("grad", call.grad);
    const metal::Memory grad_sum = metal::input_data("grad_sum", call.grad_sum);
    const metal::Memory input = metal::input_data("input", call.input);
    const metal::Memory gate = metal::input_data("gate", call.gate);
    const metal::Memory grad_input = metal::output_data("grad_input", call.grad_input);
    const metal::Memory grad_gate = metal::output_data("grad_gate", call.grad_gate);
    const RmsNormArgs args = args_of(call);
    const auto plan_of = call.grad_gamma != nullptr ? plan_summed_rows : plan_rows;
    const RowPlan plan = plan_of(args.rows, args.width, kBackwardBudget);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, *call.input, plan, args.width);
    metal::Launch launch = launch_of(instance_of("rms_norm_backward", dtype_of(*call.input), plan), call);
    launch.constant(kAddsGradSumConstant, call.grad_sum != nullptr)
        .constant(kWantsInputConstant, call.grad_input != nullptr)
        .constant(kWantsGateConstant, call.grad_gate != nullptr)
        .constant(kWantsGammaConstant, call.grad_gamma != nullptr)
        .buffer(kGammaBuffer, gamma)
        .buffer(kGradBuffer, grad)
        .buffer(kGradSumBuffer, grad_sum)
        .buffer(kInputBuffer, input)
        .buffer(kGateBuffer, gate)
        .buffer(kGradInputBuffer, grad_input)
        .buffer(kGradGateBuffer, grad_gate)
        .buffer(kGammaPartialsBuffer, gamma_partials.memory());
    run_rows(launch, plan);
    gamma_partials.sum();
  });
}

}  // namespace rudnn
