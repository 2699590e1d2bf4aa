#include "cpu/softmax_last_axis.h"

#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "ops/softmax_last_axis.h"

namespace rudnn {

void launch_softmax_last_axis(const Tensor& input, const Tensor& output) {
  static const auto rows = RUDNN_CHOOSE(softmax_last_axis_rows);
  SoftmaxArgs args;
  args.dtype = dtype_of(input);
  args.width = input.size(-1);
  args.input = input.const_data_ptr();
  args.output = output.mutable_data_ptr();
  cpu::advise_huge_pages(&output);
  cpu::parallel_for(input.numel() / args.width, args.width, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(args.dtype == DType::kFloat32 ? 0 : args.width);
    rows(args, begin, end, scratch.data());
  });
}

void launch_softmax_last_axis_backward(const Tensor& grad, const Tensor& output, const Tensor& grad_input) {
  static const auto rows = RUDNN_CHOOSE(softmax_last_axis_backward_rows);
  SoftmaxBackwardArgs args;
  args.dtype = dtype_of(output);
  args.width = output.size(-1);
  args.grad = grad.const_data_ptr();
  args.output = output.const_data_ptr();
  args.grad_input = grad_input.mutable_data_ptr();
  cpu::advise_huge_pages(&grad_input);
  cpu::parallel_for(output.numel() / args.width, args.width,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

}  // namespace rudnn
