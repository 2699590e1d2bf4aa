#include "cpu/attention_problem.h"

namespace rudnn {
namespace {

ScoreOperand operand_of(const Tensor* tensor) {
  if (tensor == nullptr) return {};
  const auto stride = [&](int64_t axis) { return tensor->size(axis) == 1 ? 0 : tensor->stride(axis); };
  return {tensor->const_data_ptr(), stride(0), stride(1), stride(2), stride(3)};
}

}  // namespace

HeadRows head_rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

AttentionProblem problem_of(const AttentionInputs& inputs, const AttentionOptions& options, const float* sinks) {
  AttentionProblem problem;
  problem.dtype = dtype_of(*inputs.query);
  problem.batch = inputs.query->size(0);
  problem.heads = inputs.query->size(1);
  problem.key_heads = inputs.key->size(1);
  problem.queries = inputs.query->size(2);
  problem.keys = inputs.key->size(2);
  problem.head_dim = inputs.query->size(3);
  problem.value_dim = inputs.value->size(3);
  problem.query = head_rows_of(*inputs.query);
  problem.key = head_rows_of(*inputs.key);
  problem.value = head_rows_of(*inputs.value);
  problem.mask = operand_of(inputs.mask);
  problem.bias = operand_of(inputs.bias);
  if (inputs.bias != nullptr) problem.bias_dtype = dtype_of(*inputs.bias);
  problem.sinks = sinks;
  problem.scale = options.scale;
  problem.softcap = options.softcap;
  const KeyBounds bounds = key_bounds(inputs, options);
  problem.keys_before = bounds.before;
  problem.keys_after = bounds.after;
  return problem;
}

}  // namespace rudnn
