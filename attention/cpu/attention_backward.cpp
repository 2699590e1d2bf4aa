#include <algorithm>
#include <cstring>

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "common/cpu/tiles.h"
#include "cpu/attention.h"
#include "cpu/attention_problem.h"
#include "ops/attention.h"

namespace rudnn {
namespace {

void clear(const Tensor* tensor) {
  if (tensor == nullptr || tensor->numel() == 0) return;
  std::memset(tensor->mutable_data_ptr(), 0, static_cast<size_t>(tensor->numel()) * tensor->element_size());
}

// What computes the gradients of keys, values and queries.
struct HeadsKernel {
  AttentionScratch* scratch;
  AttentionScratch* rows_size;
  AttentionBackwardPhase* heads;
  AttentionBackwardPhase* rows;
  AttentionBackwardPhase* keys;
  AttentionBackwardPhase* queries;
  int64_t row_tile;
  int64_t key_tile;
};

HeadsKernel heads_kernel(bool accelerated) {
#if RUDNN_X86_ISAS
  if (accelerated && cpu::has_tiles()) {
    return {&amx::attention_grad_scratch,
            &amx::attention_grad_rows_size,
            &amx::attention_grad_heads,
            &amx::attention_grad_rows,
            &amx::attention_grad_keys,
            &amx::attention_grad_queries,
            kGradRows,
            kGradKeys};
  }
  if (accelerated) {
    return {&avx512_bf16::attention_grad_scratch,
            &avx512_bf16::attention_grad_rows_size,
            &avx512_bf16::attention_grad_heads,
            &avx512_bf16::attention_grad_rows,
            &avx512_bf16::attention_grad_keys,
            &avx512_bf16::attention_grad_queries,
            kGradRows,
            kGradKeys};
  }
#endif
  static const auto scratch = RUDNN_CHOOSE(attention_grad_scratch);
  static const auto rows_size = RUDNN_CHOOSE(attention_grad_rows_size);
  static const auto heads = RUDNN_CHOOSE(attention_grad_heads);
  static const auto rows = RUDNN_CHOOSE(attention_grad_rows);
  static const auto keys = RUDNN_CHOOSE(attention_grad_keys);
  static const auto queries = RUDNN_CHOOSE(attention_grad_queries);
  static_cast<void>(accelerated);
  return {scratch, rows_size, heads, rows, keys, queries, kRowTile, kKeyTile};
}

void run_phase(AttentionBackwardPhase* phase, const AttentionBackwardArgs& args, int64_t units, int64_t work,
               const ThreadScratch& scratch) {
  for_each_range(units, work, scratch,
                 [&](float* memory, int64_t begin, int64_t end) { phase(args, memory, begin, end); });
}

// Gradients of keys, values and queries. Where there are fewer key heads than threads these share out one after the
// other, which computes scores twice; sums have the same order.
void differentiate_heads(AttentionBackwardArgs args, bool accelerated) {
  const HeadsKernel kernel = heads_kernel(accelerated);
  const AttentionProblem& problem = args.problem;
  using cpu::Workspace;
  const int64_t heads = problem.batch * problem.key_heads;
  const int64_t work = 2 * work_of(problem);
  const int64_t rows_size = kernel.rows_size(problem);
  if (heads >= static_cast<int64_t>(torch::stable::get_num_threads())) {
    ThreadScratch scratch(kernel.scratch(problem) + rows_size);
    Workspace workspace(scratch.bytes());
    scratch.take(workspace);
    return run_phase(kernel.heads, args, heads, work, scratch);
  }
  ThreadScratch scratch(kernel.scratch(problem));
  Workspace workspace(scratch.bytes() + Workspace::size_of<float>(rows_size));
  scratch.take(workspace);
  args.shared_rows = workspace.take<float>(rows_size);
  const int64_t row_tiles = row_tiles_of(problem, kernel.row_tile).count;
  for (args.shared_head = 0; args.shared_head < heads; ++args.shared_head) {
    run_phase(kernel.rows, args, row_tiles, rows_size, scratch);
    if (args.grad_key != nullptr || args.grad_value != nullptr) {
      run_phase(kernel.keys, args, cpu::ceil_div(problem.keys, kernel.key_tile), work / heads, scratch);
    }
    if (args.grad_query != nullptr) run_phase(kernel.queries, args, row_tiles, work / heads, scratch);
  }
}

int64_t bias_tiles(const AttentionBackwardArgs& args) {
  return args.bias_shape[0] * args.bias_shape[1] * cpu::ceil_div(args.bias_shape[2], kRowTile) *
         cpu::ceil_div(args.bias_shape[3], kKeyTile);
}

void run_backward(AttentionBackwardArgs args, bool accelerated) {
  static const auto bias_scratch = RUDNN_CHOOSE(attention_grad_bias_scratch);
  static const auto delta = RUDNN_CHOOSE(attention_delta);
  static const auto grad_bias = RUDNN_CHOOSE(attention_grad_bias);
  static const auto grad_sinks = RUDNN_CHOOSE(attention_grad_sinks);
  using cpu::Workspace;
  const AttentionProblem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  ThreadScratch scratch(args.grad_bias != nullptr ? bias_scratch(problem) : 0);
  Workspace workspace(Workspace::size_of<float>(rows) + scratch.bytes());
  args.delta = workspace.take<float>(rows);
  scratch.take(workspace);
  run_phase(delta, args, rows, rows * problem.value_dim, scratch);
  if (args.grad_query != nullptr || args.grad_key != nullptr || args.grad_value != nullptr) {
    differentiate_heads(args, accelerated);
  }
  if (args.grad_bias != nullptr) run_phase(grad_bias, args, bias_tiles(args), work_of(problem), scratch);
  if (args.grad_sinks != nullptr) run_phase(grad_sinks, args, problem.heads, 16 * rows, scratch);
}

}  // namespace

void launch_attention_backward(const AttentionBackwardCall& call) {
  if (call.lse->numel() == 0 || call.inputs.key->size(2) == 0) {
    for (const Tensor* gradient : {call.grad_query, call.grad_key, call.grad_value, call.grad_bias, call.grad_sinks}) {
      clear(gradient);
    }
    return;
  }
  const cpu::FloatRow sinks(call.inputs.sinks);
  AttentionBackwardArgs args;
  args.problem = problem_of(call.inputs, call.options, sinks.data());
  args.grad = head_rows_of(*call.grad);
  args.output = head_rows_of(*call.output);
  args.lse = static_cast<const float*>(call.lse->const_data_ptr());
  args.grad_query = mutable_data_or_null(call.grad_query);
  args.grad_key = mutable_data_or_null(call.grad_key);
  args.grad_value = mutable_data_or_null(call.grad_value);
  args.grad_bias = mutable_data_or_null(call.grad_bias);
  args.grad_sinks = mutable_data_or_null(call.grad_sinks);
  if (call.inputs.bias != nullptr) {
    for (int axis = 0; axis < 4; ++axis) args.bias_shape[axis] = call.inputs.bias->size(axis);
  }
  if (call.inputs.sinks != nullptr) args.sinks_dtype = dtype_of(*call.inputs.sinks);
  for (const Tensor* gradient : {call.grad_query, call.grad_key, call.grad_value, call.grad_bias}) {
    cpu::advise_huge_pages(gradient);
  }
  run_backward(args, call.options.accelerated);
}

}  // namespace rudnn
