#include "cuda/launch.cuh"
#include "cuda/rms_norm.cuh"
#include "ops/rms_norm.h"

namespace rudnn {

void launch_rms_norm(const RmsNormCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    RmsNormArgs args;
    args.width = call.gamma->numel();
    args.rows = call.input->numel() / args.width;
    args.epsilon = static_cast<float>(call.epsilon);
    args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
    args.gamma_offset = call.zero_centered ? 1.0f : 0.0f;
    args.activation = call.activation;
    args.gamma = parameter("gamma", call.gamma);
    args.input = cuda::input_data("input", call.input);
    args.residual = cuda::input_data("residual", call.residual);
    args.gate = cuda::input_data("gate", call.gate);
    args.output = cuda::output_data("output", call.output);
    args.sum = cuda::output_data("sum", call.sum);
    const int64_t element_bytes = call.input->element_size();
    const RowPlan plan = plan_rows<ForwardBudget>(args.rows, args.width, element_bytes);
    visit_rows<ForwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      using T = typename decltype(type)::type;
      using Shape = decltype(shape);
      launch_rows(args.gate != nullptr ? rms_norm<T, Shape, true> : rms_norm<T, Shape, false>, plan, stream, args);
    });
  });
}

void launch_rms_norm_backward(const RmsNormBackwardCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    RmsNormBackwardArgs args;
    args.width = call.gamma->numel();
    args.rows = call.input->numel() / args.width;
    args.epsilon = static_cast<float>(call.epsilon);
    args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
    args.gamma_offset = call.zero_centered ? 1.0f : 0.0f;
    args.activation = call.activation;
    args.gamma = parameter("gamma", call.gamma);
    args.grad = cuda::input_data("grad", call.grad);
    args.grad_sum = cuda::input_data("grad_sum", call.grad_sum);
    args.input = cuda::input_data("input", call.input);
    args.gate = cuda::input_data("gate", call.gate);
    args.grad_input = cuda::output_data("grad_input", call.grad_input);
    args.grad_gate = cuda::output_data("grad_gate", call.grad_gate);
    const int64_t element_bytes = call.input->element_size();
    const RowPlan plan = call.grad_gamma != nullptr
                             ? plan_summed_rows<BackwardBudget>(args.rows, args.width, element_bytes)
                             : plan_rows<BackwardBudget>(args.rows, args.width, element_bytes);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, *call.input, plan, args.width);
    args.gamma_partials = gamma_partials.data();
    visit_rows<BackwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      using T = typename decltype(type)::type;
      using Shape = decltype(shape);
      const auto kernel = args.gate != nullptr ? rms_norm_backward<T, Shape, true> : rms_norm_backward<T, Shape, false>;
      launch_rows(kernel, plan, stream, args);
    });
    gamma_partials.sum(stream);
  });
}

}  // namespace rudnn
