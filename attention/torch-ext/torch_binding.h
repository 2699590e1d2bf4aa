// The registered ops. Each checks what memory safety needs and returns fresh contiguous tensors. Names of dimensions: B
// batch, Hq heads of queries, Hkv heads of keys, Sq queries, Sk keys, D and Dv sizes of a head.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "common/tensor.h"

namespace rudnn {

// Output [B, Hq, Sq, Dv] in the query's dtype, and the natural log-sum-exp of the scores, float32 [B, Hq, Sq].
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& sinks, double scale, double softcap, bool is_causal,
                                     int64_t window_left, int64_t window_right, bool accelerated);

// Gradients of query, key, value, bias and sinks, each in its argument's shape and dtype. Those that are not needed
// come back with shape (0,).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks, const Tensor& output, const Tensor& lse,
    double scale, double softcap, bool is_causal, int64_t window_left, int64_t window_right, bool accelerated,
    bool need_query, bool need_key, bool need_value, bool need_bias, bool need_sinks);

// The dtypes, comma-separated, that `accelerated` may be asked for on the hardware at hand.
std::string accelerated_dtypes();

}  // namespace rudnn
