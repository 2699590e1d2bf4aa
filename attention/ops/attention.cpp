#include "ops/attention.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "common/check.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

// The tensor itself if the elements of its last axis are neighbours, else a contiguous copy.
Tensor with_contiguous_rows(const Tensor& tensor) {
  const bool packed = tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
  return packed && is_aligned(tensor) ? tensor : contiguous_copy(tensor);
}

void check_four_axes(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.dim() != 4) {
    fail_check(op, argument, "must have 4 axes, got shape " + describe_shape(shape_of(tensor)));
  }
}

void check_head_dim(const char* op, const char* argument, int64_t head_dim) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail_check(op, argument,
               "must have a last axis of 1 to " + std::to_string(kMaxHeadDim) + ", got " + std::to_string(head_dim));
  }
}

void check_float_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& query) {
  check_float32_or_like(op, argument, tensor, query);
  check_same_device(op, argument, tensor, query);
}

void check_broadcast(const char* op, const char* argument, const Tensor& tensor, const std::vector<int64_t>& scores) {
  check_four_axes(op, argument, tensor);
  for (int64_t axis = 0; axis < 4; ++axis) {
    if (tensor.size(axis) != 1 && tensor.size(axis) != scores[axis]) {
      fail_check(op, argument,
                 "must broadcast to " + describe_shape(scores) + ", got shape " + describe_shape(shape_of(tensor)));
    }
  }
}

// Inputs as the launchers want them.
struct CheckedInputs {
  Tensor query, key, value;
  std::optional<Tensor> mask, bias, sinks;

  AttentionInputs view() const { return {&query, &key, &value, pointer_to(mask), pointer_to(bias), pointer_to(sinks)}; }
  std::vector<int64_t> lse_shape() const { return {query.size(0), query.size(1), query.size(2)}; }
  std::vector<int64_t> output_shape() const { return {query.size(0), query.size(1), query.size(2), value.size(3)}; }
};

CheckedInputs check_inputs(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                           const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& sinks, bool accelerated) {
  check_float(op, "query", query);
  check_four_axes(op, "query", query);
  check_four_axes(op, "key", key);
  check_four_axes(op, "value", value);
  const int64_t batch = query.size(0), heads = query.size(1), key_heads = key.size(1), keys = key.size(2);
  check_head_dim(op, "query", query.size(3));
  check_head_dim(op, "value", value.size(3));
  check_dtype(op, "key", key, query.scalar_type());
  check_dtype(op, "value", value, query.scalar_type());
  check_shape(op, "key", key, {batch, key_heads, keys, query.size(3)});
  check_shape(op, "value", value, {batch, key_heads, keys, value.size(3)});
  check_same_device(op, "key", key, query);
  check_same_device(op, "value", value, query);
  if (key_heads < 1 || heads % key_heads != 0) {
    fail_check(
        op, "query",
        "must have a multiple of the key's " + std::to_string(key_heads) + " heads, got " + std::to_string(heads));
  }
  const std::vector<int64_t> scores = {batch, heads, query.size(2), keys};
  if (mask) {
    check_dtype(op, "mask", *mask, ScalarType::Bool);
    check_same_device(op, "mask", *mask, query);
    check_broadcast(op, "mask", *mask, scores);
  }
  if (bias) {
    check_float_like(op, "bias", *bias, query);
    check_broadcast(op, "bias", *bias, scores);
  }
  if (sinks) {
    check_float_like(op, "sinks", *sinks, query);
    check_shape(op, "sinks", *sinks, {heads});
  }
  if (accelerated && !has_matrix_units(dtype_of(query))) {
    fail_check(op, "accelerated",
               std::string("must be false: this hardware has no matrix units for ") + dtype_name(query.scalar_type()) +
                   ", got true");
  }
  return {with_contiguous_rows(query), with_contiguous_rows(key), with_contiguous_rows(value), mask, bias,
          as_contiguous(sinks)};
}

AttentionOptions check_options(const char* op, double scale, double softcap, bool is_causal, int64_t window_left,
                               int64_t window_right, bool accelerated) {
  if (window_left < -1 || window_right < -1) {
    fail_check(op, "window",
               "must have bounds of -1 or more, got " + std::to_string(std::min(window_left, window_right)));
  }
  return {static_cast<float>(scale), static_cast<float>(softcap), is_causal, window_left, window_right, accelerated};
}

}  // namespace

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& sinks, double scale, double softcap, bool is_causal,
                                     int64_t window_left, int64_t window_right, bool accelerated) {
  constexpr const char* kOp = "attention";
  const CheckedInputs inputs = check_inputs(kOp, query, key, value, mask, bias, sinks, accelerated);
  AttentionCall call;
  call.options = check_options(kOp, scale, softcap, is_causal, window_left, window_right, accelerated);
  const Tensor output = new_empty(query, inputs.output_shape(), query.scalar_type());
  const Tensor lse = new_empty(query, inputs.lse_shape(), ScalarType::Float);
  call.inputs = inputs.view();
  call.output = &output;
  call.lse = &lse;
  if (lse.numel() > 0) launch_attention(call);
  return {output, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks, const Tensor& output, const Tensor& lse,
    double scale, double softcap, bool is_causal, int64_t window_left, int64_t window_right, bool accelerated,
    bool need_query, bool need_key, bool need_value, bool need_bias, bool need_sinks) {
  constexpr const char* kOp = "attention_backward";
  const CheckedInputs inputs = check_inputs(kOp, query, key, value, mask, bias, sinks, accelerated);
  AttentionBackwardCall call;
  call.options = check_options(kOp, scale, softcap, is_causal, window_left, window_right, accelerated);
  for (const auto& [argument, tensor] : {std::tuple{"grad", &grad}, std::tuple{"output", &output}}) {
    check_dtype(kOp, argument, *tensor, query.scalar_type());
    check_shape(kOp, argument, *tensor, inputs.output_shape());
    check_same_device(kOp, argument, *tensor, query);
  }
  check_dtype(kOp, "lse", lse, ScalarType::Float);
  check_shape(kOp, "lse", lse, inputs.lse_shape());
  check_same_device(kOp, "lse", lse, query);
  if (need_bias && !bias) fail_check(kOp, "need_bias", "must be false without a bias, got true");
  if (need_sinks && !sinks) fail_check(kOp, "need_sinks", "must be false without sinks, got true");

  const Tensor grad_rows = with_contiguous_rows(grad);
  const Tensor output_rows = with_contiguous_rows(output);
  const Tensor sums = as_contiguous(lse);
  const auto gradient_of = [&](bool needed, const Tensor& argument) {
    return needed ? new_empty(argument, shape_of(argument), argument.scalar_type())
                  : new_empty(query, {0}, query.scalar_type());
  };
  const Tensor grad_query = gradient_of(need_query, query);
  const Tensor grad_key = gradient_of(need_key, key);
  const Tensor grad_value = gradient_of(need_value, value);
  const Tensor grad_bias = gradient_of(need_bias, bias ? *bias : query);
  const Tensor grad_sinks = gradient_of(need_sinks, sinks ? *sinks : query);
  call.inputs = inputs.view();
  call.grad = &grad_rows;
  call.output = &output_rows;
  call.lse = &sums;
  if (need_query) call.grad_query = &grad_query;
  if (need_key) call.grad_key = &grad_key;
  if (need_value) call.grad_value = &grad_value;
  if (need_bias) call.grad_bias = &grad_bias;
  if (need_sinks) call.grad_sinks = &grad_sinks;
  launch_attention_backward(call);
  return {grad_query, grad_key, grad_value, grad_bias, grad_sinks};
}

std::string accelerated_dtypes() {
  std::string names;
  if (has_matrix_units(DType::kFloat16)) names += "float16";
  if (has_matrix_units(DType::kBFloat16)) names += names.empty() ? "bfloat16" : ",bfloat16";
  return names;
}

}  // namespace rudnn
