#include "cuda/launch.cuh"
#include "cuda/layer_norm.cuh"
#include "ops/layer_norm.h"

namespace rudnn {

void launch_layer_norm(const LayerNormCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    LayerNormArgs args;
    args.width = call.gamma->numel();
    args.rows = call.input->numel() / args.width;
    args.epsilon = static_cast<float>(call.epsilon);
    args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
    args.gamma = parameter("gamma", call.gamma);
    args.beta = parameter("beta", call.beta);
    args.input = cuda::input_data("input", call.input);
    args.residual = cuda::input_data("residual", call.residual);
    args.output = cuda::output_data("output", call.output);
    args.sum = cuda::output_data("sum", call.sum);
    const int64_t element_bytes = call.input->element_size();
    const RowPlan plan = plan_rows<ForwardBudget>(args.rows, args.width, element_bytes);
    visit_rows<ForwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      launch_rows(layer_norm<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
  });
}

void launch_layer_norm_backward(const LayerNormBackwardCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    LayerNormBackwardArgs args;
    args.width = call.gamma->numel();
    args.rows = call.input->numel() / args.width;
    args.epsilon = static_cast<float>(call.epsilon);
    args.root_epsilon = static_cast<float>(std::sqrt(call.epsilon));
    args.gamma = parameter("gamma", call.gamma);
    args.grad = cuda::input_data("grad", call.grad);
    args.grad_sum = cuda::input_data("grad_sum", call.grad_sum);
    args.input = cuda::input_data("input", call.input);
    args.grad_input = cuda::output_data("grad_input", call.grad_input);
    const int64_t element_bytes = call.input->element_size();
    const bool summed = call.grad_gamma != nullptr || call.grad_beta != nullptr;
    const RowPlan plan = summed ? plan_summed_rows<BackwardBudget>(args.rows, args.width, element_bytes)
                                : plan_rows<BackwardBudget>(args.rows, args.width, element_bytes);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, *call.input, plan, args.width);
    const Partials beta_partials("grad_beta", call.grad_beta, *call.input, plan, args.width);
    args.gamma_partials = gamma_partials.data();
    args.beta_partials = beta_partials.data();
    visit_rows<BackwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      launch_rows(layer_norm_backward<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
    gamma_partials.sum(stream);
    beta_partials.sum(stream);
  });
}

}  // namespace rudnn
