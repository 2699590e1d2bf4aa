// The registered ops. Each checks what memory safety needs and returns fresh contiguous tensors. Names of dimensions: T
// tokens, k experts for each, R = T * k rows, E experts, H hidden size, I intermediate size.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "common/tensor.h"

namespace rudnn {

// Experts int32 [T, k] and their weights [T, k] in the logits' dtype.
std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, bool renormalize);
std::tuple<Tensor, Tensor> route_sigmoid_grouped(const Tensor& logits, const std::optional<Tensor>& bias, int64_t top_k,
                                                 int64_t groups, int64_t selected_groups, bool group_top_two,
                                                 bool renormalize, double scale);

// Weights float32 [T, k], and the gradient of logits [T, E] in their dtype.
Tensor selected_router_weights(const Tensor& logits, const Tensor& indices, const std::string& scoring,
                               bool renormalize, double scale);
Tensor selected_router_backward(const Tensor& logits, const Tensor& indices, const Tensor& grad_weights,
                                const std::string& scoring, bool renormalize, double scale);

// Values [R, H], expert_offsets [E + 1], row_experts [R], row_tokens [R], row_slots [R], slot_rows [T, k].
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dispatch(const Tensor& input, const Tensor& indices,
                                                                    int64_t experts);
Tensor dispatch_backward(const Tensor& grad_values, const Tensor& slot_rows);

Tensor combine(const Tensor& expert_output, const Tensor& weights, const Tensor& slot_rows);
// Gradients of the expert output, and float32 of the weights. Those that are not needed come back with shape (0,).
std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad, const Tensor& expert_output, const Tensor& weights,
                                            const Tensor& row_slots, const Tensor& slot_rows, bool plane,
                                            bool need_expert_output, bool need_weights);

// `up` may be missing: then `gate` is [E, 2 I, H] and holds the rows of gate, followed by those of up.
Tensor experts(const Tensor& values, const Tensor& expert_offsets, const Tensor& gate, const std::optional<Tensor>& up,
               const Tensor& down, bool tensor_core);
// Output [R, H], and the projections by gate and up, [R, I] each.
std::tuple<Tensor, Tensor, Tensor> experts_training(const Tensor& values, const Tensor& expert_offsets,
                                                    const Tensor& gate, const std::optional<Tensor>& up,
                                                    const Tensor& down, bool tensor_core);
// Gradients of values, gate, up (of shape (0,) where gate holds both) and down, those of weights in float32 or rounded
// to the weights' dtype. Those that are not needed come back with shape (0,); `need_up` says nothing where gate holds
// both.
std::tuple<Tensor, Tensor, Tensor, Tensor> experts_backward(const Tensor& grad, const Tensor& values,
                                                            const Tensor& expert_offsets, const Tensor& gate,
                                                            const std::optional<Tensor>& up, const Tensor& down,
                                                            const Tensor& gate_projection, const Tensor& up_projection,
                                                            bool tensor_core, bool float32_weights, bool need_values,
                                                            bool need_gate, bool need_up, bool need_down);
// Dispatch, experts and combine in one: [T, H].
Tensor fused_experts(const Tensor& input, const Tensor& indices, const Tensor& weights, const Tensor& gate,
                     const std::optional<Tensor>& up, const Tensor& down, bool tensor_core);

// Activation of the first half of the last axis times the second half: "silu", "gelu" or "gelu_tanh".
Tensor gated_activation(const Tensor& input, const std::string& activation);
Tensor gated_activation_backward(const Tensor& grad, const Tensor& input, const std::string& activation);

// The dtypes, comma-separated, that `tensor_core` may be asked for on the hardware at hand.
std::string tensor_core_dtypes();

}  // namespace rudnn
