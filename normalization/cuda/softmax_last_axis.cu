#include "cuda/launch.cuh"
#include "cuda/softmax_last_axis.cuh"
#include "ops/softmax_last_axis.h"

namespace rudnn {

void launch_softmax_last_axis(const Tensor& input, const Tensor& output) {
  cuda::run_on_device(input, [&](Stream stream) {
    SoftmaxArgs args;
    args.width = input.size(-1);
    args.rows = input.numel() / args.width;
    args.input = cuda::input_data("input", &input);
    args.output = cuda::output_data("output", &output);
    const RowPlan plan = plan_rows<ForwardBudget>(args.rows, args.width, input.element_size());
    visit_rows<ForwardBudget>(dtype_of(input), plan, [&](auto type, auto shape) {
      launch_rows(softmax_last_axis<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
  });
}

void launch_softmax_last_axis_backward(const Tensor& grad, const Tensor& output, const Tensor& grad_input) {
  cuda::run_on_device(output, [&](Stream stream) {
    SoftmaxBackwardArgs args;
    args.width = output.size(-1);
    args.rows = output.numel() / args.width;
    args.grad = cuda::input_data("grad", &grad);
    args.output = cuda::input_data("output", &output);
    args.grad_input = cuda::output_data("grad_input", &grad_input);
    const RowPlan plan = plan_rows<BackwardBudget>(args.rows, args.width, output.element_size());
    visit_rows<BackwardBudget>(dtype_of(output), plan, [&](auto type, auto shape) {
      launch_rows(softmax_last_axis_backward<typename decltype(type)::type, decltype(shape)>, plan, stream, args);
    });
  });
}

}  // namespace rudnn
