// What the launchers of the family have in common.
#pragma once

#include "common/metal/launch.h"
#include "metal/attention_args.h"
#include "ops/attention.h"

namespace rudnn {

inline HeadStrides head_strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline ScoreStrides score_strides_of(const Tensor* tensor) {
  if (tensor == nullptr) return {};
  const auto stride = [&](int64_t axis) { return tensor->size(axis) == 1 ? 0 : tensor->stride(axis); };
  return {stride(0), stride(1), stride(2), stride(3)};
}

inline AttentionArgs args_of(const AttentionInputs& inputs, const AttentionOptions& options) {
  AttentionArgs args = {};
  args.batch = inputs.query->size(0);
  args.heads = static_cast<int32_t>(inputs.query->size(1));
  args.key_heads = static_cast<int32_t>(inputs.key->size(1));
  args.queries = inputs.query->size(2);
  args.keys = inputs.key->size(2);
  args.head_dim = inputs.query->size(3);
  args.value_dim = inputs.value->size(3);
  args.query = head_strides_of(*inputs.query);
  args.key = head_strides_of(*inputs.key);
  args.value = head_strides_of(*inputs.value);
  args.mask = score_strides_of(inputs.mask);
  args.bias = score_strides_of(inputs.bias);
  args.scale = options.scale;
  args.softcap = options.softcap;
  const KeyBounds bounds = key_bounds(inputs, options);
  args.keys_before = bounds.before;
  args.keys_after = bounds.after;
  args.splits = 1;
  args.split_keys = args.keys;
  return args;
}

// Whether all rows of tensors of one last axis are multiples of 16 bytes and start at one. That the first one does, the
// ops have seen to.
inline bool have_aligned_rows(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    const DType dtype = dtype_of(*tensor);
    if (!has_aligned_rows(tensor->size(3), dtype)) return false;
    for (int64_t axis = 0; axis < 3; ++axis) {
      if (tensor->size(axis) > 1 && !has_aligned_rows(tensor->stride(axis), dtype)) return false;
    }
  }
  return true;
}

// The memory of the inputs, once for all kernels of a call.
struct InputMemory {
  metal::Memory query, key, value, mask, bias, sinks;

  explicit InputMemory(const AttentionInputs& inputs)
      : query(metal::input_data("query", inputs.query)),
        key(metal::input_data("key", inputs.key)),
        value(metal::input_data("value", inputs.value)),
        mask(metal::input_data("mask", inputs.mask)),
        bias(metal::input_data("bias", inputs.bias)),
        sinks(metal::input_data("sinks", inputs.sinks)) {}
};

inline std::string unit_instance(const char* kernel, const AttentionInputs& inputs, const AttentionOptions& options) {
  return instance_of(std::string(kernel) + (options.accelerated ? "_matrix" : "_scalar"), dtype_of(*inputs.query));
}

// Binds what scores are computed from.
inline void bind_scores(const AttentionInputs& inputs, const InputMemory& memory, metal::Launch& launch) {
  launch.constant(kHasMaskConstant, inputs.mask != nullptr)
      .constant(kHasBiasConstant, inputs.bias != nullptr)
      .constant(kBiasTypeConstant, inputs.bias != nullptr ? element_type(*inputs.bias) : int32_t{kFloatElements})
      .buffer(kQueryBuffer, memory.query)
      .buffer(kKeyBuffer, memory.key)
      .buffer(kMaskBuffer, memory.mask)
      .buffer(kBiasBuffer, memory.bias);
}

inline void bind_sinks(const AttentionInputs& inputs, const InputMemory& memory, metal::Launch& launch) {
  launch.constant(kHasSinksConstant, inputs.sinks != nullptr)
      .constant(kSinksTypeConstant, inputs.sinks != nullptr ? element_type(*inputs.sinks) : int32_t{kFloatElements})
      .buffer(kSinksBuffer, memory.sinks);
}

inline uint32_t key_heads_of(const AttentionArgs& args) { return groups_of(args.batch * args.key_heads, 1); }

}  // namespace rudnn
