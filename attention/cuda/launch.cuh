// What the launchers of attention and of its gradients have in common.
#pragma once

#include "common/cuda/call.h"
#include "cuda/scalar_machine.cuh"
#include "cuda/tensor_core_machine.cuh"
#include "cuda/walk.cuh"
#include "ops/attention.h"

namespace rudnn {

inline HeadRows head_rows_data(const char* name, const Tensor& tensor) {
  return {cuda::input_data(name, &tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline ScoreOperand score_operand_data(const char* name, const Tensor* tensor, DType dtype) {
  if (tensor == nullptr) return {};
  const auto stride = [&](int64_t axis) { return tensor->size(axis) == 1 ? 0 : tensor->stride(axis); };
  return {{cuda::input_data(name, tensor), dtype}, stride(0), stride(1), stride(2), stride(3)};
}

// Whether rows can be moved 16 bytes at a time; they start at such an address where ops/attention.cpp lets them
// through.
inline bool has_whole_vectors(const Tensor& tensor) {
  const auto is_whole = [&](int64_t elements) { return is_whole_vectors(elements, tensor.element_size()); };
  bool whole = is_whole(tensor.size(3));
  for (int64_t axis = 0; axis < 3; ++axis) whole = whole && (tensor.size(axis) == 1 || is_whole(tensor.stride(axis)));
  return whole;
}

inline AttentionArgs common_args(const AttentionInputs& inputs, const AttentionOptions& options) {
  AttentionArgs args{};
  args.batch = inputs.query->size(0);
  args.heads = inputs.query->size(1);
  args.key_heads = inputs.key->size(1);
  args.head_dim = inputs.query->size(3);
  args.value_dim = inputs.value->size(3);
  const KeyBounds bounds = key_bounds(inputs, options);
  args.window = {inputs.query->size(2), inputs.key->size(2), bounds.before, bounds.after};
  args.query = head_rows_data("query", *inputs.query);
  args.key = head_rows_data("key", *inputs.key);
  args.value = head_rows_data("value", *inputs.value);
  args.mask = score_operand_data("mask", inputs.mask, DType::kFloat32);
  if (inputs.bias != nullptr) args.bias = score_operand_data("bias", inputs.bias, dtype_of(*inputs.bias));
  if (inputs.sinks != nullptr) args.sinks = {cuda::input_data("sinks", inputs.sinks), dtype_of(*inputs.sinks)};
  args.scale = options.scale;
  args.softcap = options.softcap;
  args.vectors = has_whole_vectors(*inputs.query) && has_whole_vectors(*inputs.key) && has_whole_vectors(*inputs.value);
  args.splits = 1;
  return args;
}

// Calls visit(MachineTag) with a machine for results of so many columns. On tensor cores blocks have few rows where all
// rows of a key head fit, and where the stationary ones, of `depth` elements in all, would not fit into shared memory.
template <class Machine>
struct MachineTag {
  using type = Machine;
};
template <class Visit>
void visit_machine(bool accelerated, DType dtype, int64_t result_columns, int64_t depth, int64_t rows, Visit&& visit) {
  constexpr int64_t kFewRows = 16, kMostDepth = 512;
  // Of two products whose depths are chunks and a bit.
  constexpr size_t kMostBytes = ((kMostDepth / kChunk + 1) * 64 + 3 * kStreamed) * kChunk * 2;
  static_assert(kMostBytes <= 99 * 1024, "a block may have so much shared memory from capability 8.6 on");
  visit_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto visit_columns = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      if constexpr (sizeof(T) == 2) {
        if (accelerated && (rows <= kFewRows || depth > kMostDepth))
          return visit(MachineTag<TensorCoreMachine<T, 16, kColumns>>{});
        if (accelerated) return visit(MachineTag<TensorCoreMachine<T, 64, kColumns>>{});
      }
      visit(MachineTag<ScalarMachine<T, kColumns>>{});
    };
    if (result_columns <= 64)
      visit_columns(std::integral_constant<int, 64>{});
    else
      visit_columns(std::integral_constant<int, 128>{});
  });
}

inline LaunchConfig grid_of(int64_t blocks, int threads, size_t shared_bytes, Stream stream) {
  return {blocks_of(blocks), dim3(threads), shared_bytes, stream};
}

// Launches a role, whose stationary rows have so many columns for each of its products.
template <template <class> class Role, class Machine>
void launch_role(const AttentionArgs& args, int64_t depth, int64_t second_depth, Stream stream) {
  using Walk = Role<Machine>;
  const int64_t blocks = Walk::slices(args) * Walk::tiles(args) * args.key_heads * args.batch;
  launch(walk_kernel<Machine, Role>,
         grid_of(blocks, Machine::kThreads, Machine::shared_bytes(depth, second_depth), stream), args);
}

}  // namespace rudnn
