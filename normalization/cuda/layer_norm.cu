#include "cuda/layer_norm.cuh"
#include "cuda/norm_launch.cuh"
#include "ops/layer_norm.h"

namespace rudnn {

void launch_layer_norm(const LayerNormCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    const LayerNormArgs args = {forward_args(call), parameter("beta", call.beta)};
    const RowPlan plan = plan_rows<ForwardBudget>(args.rows, args.width, call.input->element_size());
    visit_rows<ForwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      launch_rows(layer_norm<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
  });
}

void launch_layer_norm_backward(const LayerNormBackwardCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    const RowPlan plan = plan_backward(call, call.grad_gamma != nullptr || call.grad_beta != nullptr);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, plan);
    const Partials beta_partials("grad_beta", call.grad_beta, plan);
    const LayerNormBackwardArgs args = {backward_args(call, gamma_partials), beta_partials.data()};
    visit_rows<BackwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      launch_rows(layer_norm_backward<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
    gamma_partials.sum(stream);
    beta_partials.sum(stream);
  });
}

}  // namespace rudnn
