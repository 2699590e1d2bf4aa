#include "cpu/layer_norm.h"

#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/memory.h"
#include "cpu/parameter_gradients.h"
#include "ops/layer_norm.h"

namespace rudnn {

void launch_layer_norm(const LayerNormCall& call) {
  static const auto rows = RUDNN_CHOOSE(layer_norm_rows);
  LayerNormArgs args;
  args.dtype = dtype_of(*call.input);
  args.gamma_dtype = dtype_of(*call.gamma);
  args.beta_dtype = call.beta != nullptr ? dtype_of(*call.beta) : DType::kFloat32;
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.input = call.input->const_data_ptr();
  args.residual = const_data_or_null(call.residual);
  args.gamma = call.gamma->const_data_ptr();
  args.beta = const_data_or_null(call.beta);
  args.output = call.output->mutable_data_ptr();
  args.sum = mutable_data_or_null(call.sum);
  cpu::advise_huge_pages(*call.output);
  if (call.sum != nullptr) cpu::advise_huge_pages(*call.sum);
  cpu::parallel_for(call.input->numel() / args.width, args.width, [&](int64_t begin, int64_t end) {
    const bool widen = args.gamma_dtype != DType::kFloat32 || args.beta_dtype != DType::kFloat32;
    std::vector<float> scratch(widen ? 2 * args.width : 0);
    rows(args, begin, end, scratch.data());
  });
}

void launch_layer_norm_backward(const LayerNormBackwardCall& call) {
  static const auto rows = RUDNN_CHOOSE(layer_norm_backward_rows);
  LayerNormBackwardArgs args;
  args.dtype = dtype_of(*call.input);
  args.gamma_dtype = dtype_of(*call.gamma);
  args.width = call.gamma->numel();
  args.epsilon = call.epsilon;
  args.grad = call.grad->const_data_ptr();
  args.grad_sum = const_data_or_null(call.grad_sum);
  args.input = call.input->const_data_ptr();
  args.gamma = call.gamma->const_data_ptr();
  args.grad_input = mutable_data_or_null(call.grad_input);
  if (call.grad_input != nullptr) cpu::advise_huge_pages(*call.grad_input);
  cpu::sum_parameter_gradients<2>(call.input->numel() / args.width, args.width, {call.grad_gamma, call.grad_beta},
                                  [&](int64_t begin, int64_t end, float* const* sums) {
                                    std::vector<float> scratch(args.gamma_dtype == DType::kFloat32 ? 0 : args.width);
                                    rows(args, begin, end, scratch.data(), sums[0], sums[1]);
                                  });
}

}  // namespace rudnn
