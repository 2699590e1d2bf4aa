#include <algorithm>

#include "cuda/attention_backward.cuh"
#include "cuda/gradients.h"
#include "cuda/launch.cuh"

namespace rudnn {
namespace {

// The gradient of what nothing was computed from.
void zero(const Tensor* gradient) {
  if (gradient == nullptr) return;
  Tensor zeros = *gradient;
  torch::stable::zero_(zeros);
}

void launch_bias_gradient(const AttentionArgs& args, DType dtype, Stream stream) {
  visit_dtype(dtype, [&](auto type) {
    using Machine = ScalarMachine<typename decltype(type)::type, kStreamed>;
    constexpr size_t kSumBytes = 2 * kStreamed * (kStreamed + 1) * sizeof(float);
    const size_t shared_bytes = std::max(Machine::shared_bytes(args.head_dim, args.value_dim), kSumBytes);
    launch(grad_bias_kernel<Machine>, grid_of(GradBias<Machine>::tiles(args), Machine::kThreads, shared_bytes, stream),
           args);
  });
}

}  // namespace

void launch_attention_backward(const AttentionBackwardCall& call) {
  const AttentionInputs& inputs = call.inputs;
  if (call.lse->numel() == 0 || inputs.key->size(2) == 0) {
    for (const Tensor* gradient : {call.grad_query, call.grad_key, call.grad_value, call.grad_bias, call.grad_sinks})
      zero(gradient);
    return;
  }
  cuda::run_on_device(*inputs.query, [&](Stream stream) {
    const Tensor delta = new_empty_like(*call.lse);
    AttentionArgs args = common_args(inputs, call.options);
    args.vectors = args.vectors && has_whole_vectors(*call.grad) && has_whole_vectors(*call.output);
    args.grad = head_rows_data("grad", *call.grad);
    args.forward_output = head_rows_data("output", *call.output);
    args.known_lse = static_cast<const float*>(cuda::input_data("lse", call.lse));
    args.delta = static_cast<float*>(cuda::scratch_data("delta", &delta));
    args.grad_query = cuda::output_data("grad_query", call.grad_query);
    args.grad_key = cuda::output_data("grad_key", call.grad_key);
    args.grad_value = cuda::output_data("grad_value", call.grad_value);
    args.grad_bias = cuda::output_data("grad_bias", call.grad_bias);
    args.grad_sinks = cuda::output_data("grad_sinks", call.grad_sinks);
    if (inputs.bias != nullptr)
      for (int axis = 0; axis < 4; ++axis) args.bias_shape[axis] = inputs.bias->size(axis);

    const DType dtype = dtype_of(*inputs.query);
    const bool accelerated = call.options.accelerated;
    visit_dtype(dtype, [&](auto type) {
      launch(sum_delta<typename decltype(type)::type>,
             grid_of(ceil_divide(call.lse->numel(), kDeltaThreads), kDeltaThreads, 0, stream), args);
    });
    if (args.grad_query != nullptr) launch_grad_query(args, dtype, accelerated, stream);
    if (args.grad_key != nullptr) launch_grad_key(args, dtype, accelerated, stream);
    if (args.grad_value != nullptr) launch_grad_value(args, dtype, accelerated, stream);
    if (args.grad_bias != nullptr) launch_bias_gradient(args, dtype, stream);
    if (args.grad_sinks != nullptr)
      launch(grad_sinks_kernel<kSinkThreads>, grid_of(args.heads, kSinkThreads, 0, stream), args);
  });
}

}  // namespace rudnn
