#include "cuda/norm_launch.cuh"
#include "cuda/rms_norm.cuh"
#include "ops/rms_norm.h"

namespace rudnn {
namespace {

template <class Call>
float gamma_offset(const Call& call) {
  return call.zero_centered ? 1.0f : 0.0f;
}

}  // namespace

void launch_rms_norm(const RmsNormCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    const RmsNormArgs args = {forward_args(call), gamma_offset(call), call.activation,
                              cuda::input_data("gate", call.gate)};
    const RowPlan plan = plan_rows<ForwardBudget>(args.rows, args.width, call.input->element_size());
    visit_rows<ForwardBudget>(dtype_of(*call.input), plan, [&](auto type, auto shape) {
      using T = typename decltype(type)::type;
      using Shape = decltype(shape);
      launch_rows(args.gate != nullptr ? rms_norm<T, Shape, true> : rms_norm<T, Shape, false>, plan, stream, args);
    });
  });
}

void launch_rms_norm_backward(const RmsNormBackwardCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    const RowPlan plan = plan_backward(call, call.grad_gamma != nullptr);
    const Partials gamma_partials("grad_gamma", call.grad_gamma, plan);
    const RmsNormBackwardArgs args = {backward_args(call, gamma_partials), gamma_offset(call), call.activation,
                                      cuda::input_data("gate", call.gate),
                                      cuda::output_data("grad_gate", call.grad_gate)};
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
