#include "cpu/layer_norm.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "cpu/parameter_gradients.h"
#include "ops/layer_norm.h"

namespace rudnn {

void launch_layer_norm(const LayerNormCall& call) {
  static const auto rows = RUDNN_CHOOSE(layer_norm_rows);
  const cpu::FloatRow gamma(call.gamma);
  const cpu::FloatRow beta(call.beta);
  LayerNormArgs args;
  args.dtype = dtype_of(*call.input);
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.input = call.input->const_data_ptr();
  args.residual = const_data_or_null(call.residual);
  args.gamma = gamma.data();
  args.beta = beta.data();
  args.output = call.output->mutable_data_ptr();
  args.sum = mutable_data_or_null(call.sum);
  cpu::advise_huge_pages(call.output);
  cpu::advise_huge_pages(call.sum);
  cpu::parallel_for(call.input->numel() / args.width, args.width,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void launch_layer_norm_backward(const LayerNormBackwardCall& call) {
  static const auto rows = RUDNN_CHOOSE(layer_norm_backward_rows);
  const cpu::FloatRow gamma(call.gamma);
  LayerNormBackwardArgs args;
  args.dtype = dtype_of(*call.input);
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.grad = call.grad->const_data_ptr();
  args.grad_sum = const_data_or_null(call.grad_sum);
  args.input = call.input->const_data_ptr();
  args.gamma = gamma.data();
  args.grad_input = mutable_data_or_null(call.grad_input);
  cpu::advise_huge_pages(call.grad_input);
  cpu::sum_parameter_gradients<2>(
      call.input->numel() / args.width, args.width, {call.grad_gamma, call.grad_beta},
      [&](int64_t begin, int64_t end, float* const* sums) { rows(args, begin, end, sums[0], sums[1]); });
}

}  // namespace rudnn
