#include "cpu/rms_norm.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "cpu/parameter_gradients.h"
#include "ops/rms_norm.h"

namespace rudnn {

void launch_rms_norm(const RmsNormCall& call) {
  static const auto rows = RUDNN_CHOOSE(rms_norm_rows);
  const cpu::FloatRow gamma(call.gamma);
  RmsNormArgs args;
  args.dtype = dtype_of(*call.input);
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.gamma_offset = call.zero_centered ? 1.0f : 0.0f;
  args.input = call.input->const_data_ptr();
  args.residual = const_data_or_null(call.residual);
  args.gate = const_data_or_null(call.gate);
  args.activation = call.activation;
  args.gamma = gamma.data();
  args.output = call.output->mutable_data_ptr();
  args.sum = mutable_data_or_null(call.sum);
  cpu::advise_huge_pages(call.output);
  cpu::advise_huge_pages(call.sum);
  cpu::parallel_for(call.input->numel() / args.width, args.width,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void launch_rms_norm_backward(const RmsNormBackwardCall& call) {
  static const auto rows = RUDNN_CHOOSE(rms_norm_backward_rows);
  const cpu::FloatRow gamma(call.gamma);
  RmsNormBackwardArgs args;
  args.dtype = dtype_of(*call.input);
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.gamma_offset = call.zero_centered ? 1.0f : 0.0f;
  args.grad = call.grad->const_data_ptr();
  args.grad_sum = const_data_or_null(call.grad_sum);
  args.input = call.input->const_data_ptr();
  args.gate = const_data_or_null(call.gate);
  args.activation = call.activation;
  args.gamma = gamma.data();
  args.grad_input = mutable_data_or_null(call.grad_input);
  args.grad_gate = mutable_data_or_null(call.grad_gate);
  cpu::advise_huge_pages(call.grad_input);
  cpu::advise_huge_pages(call.grad_gate);
  cpu::sum_parameter_gradients<1>(
      call.input->numel() / args.width, args.width, {call.grad_gamma},
      [&](int64_t begin, int64_t end, float* const* sums) { rows(args, begin, end, sums[0]); });
}

}  // namespace rudnn
