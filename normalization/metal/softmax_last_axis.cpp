#include "ops/softmax_last_axis.h"

#include "metal/launch.h"
#include "metal/softmax_last_axis_args.h"

namespace rudnn {

void launch_softmax_last_axis(const Tensor& input, const Tensor& output) {
  metal::run_on_device([&] {
    const SoftmaxArgs args = {input.numel() / input.size(-1), input.size(-1)};
    const metal::Memory x = metal::input_data("input", &input);
    const metal::Memory y = metal::output_data("output", &output);
    const RowPlan plan = plan_rows(args.rows, args.width, kForwardBudget);
    const std::string kernel = instance_of("softmax_last_axis", dtype_of(input), plan);
    run_rows(metal::Launch(kernel).bytes(kArgsBuffer, args).buffer(kInputBuffer, x).buffer(kOutputBuffer, y), plan);
  });
}

void launch_softmax_last_axis_backward(const Tensor& grad, const Tensor& output, const Tensor& grad_input) {
  metal::run_on_device([&] {
    const SoftmaxArgs args = {output.numel() / output.size(-1), output.size(-1)};
    const metal::Memory grads = metal::input_data("grad", &grad);
    const metal::Memory y = metal::input_data("output", &output);
    const metal::Memory result = metal::output_data("grad_input", &grad_input);
    const RowPlan plan = plan_rows(args.rows, args.width, kBackwardBudget);
    const std::string kernel = instance_of("softmax_last_axis_backward", dtype_of(output), plan);
    run_rows(metal::Launch(kernel)
                 .bytes(kArgsBuffer, args)
                 .buffer(kGradBuffer, grads)
                 .buffer(kOutputBuffer, y)
                 .buffer(kGradInputBuffer, result),
             plan);
  });
}

}  // namespace rudnn
