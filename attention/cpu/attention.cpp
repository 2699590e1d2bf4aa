#include "cpu/attention.h"

#include <algorithm>

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "common/cpu/tiles.h"
#include "cpu/attention_problem.h"
#include "ops/attention.h"

namespace rudnn {
namespace {

// Keys are split only where a key head has a single tile of rows.
void split_keys(int64_t row_tiles, AttentionArgs& args) {
  const int64_t keys = args.problem.keys;
  args.split_keys = keys;
  if (row_tiles != 1 || keys <= kSplitKeys) return;
  const int64_t tiles_per_split = cpu::ceil_div(cpu::ceil_div(keys, kMaxSplits), kMaxKeyTile);
  args.split_keys = std::max(kSplitKeys, tiles_per_split * kMaxKeyTile);
  args.splits = cpu::ceil_div(keys, args.split_keys);
}

int64_t rows_of(const AttentionProblem& problem) { return problem.batch * problem.heads * problem.queries; }

// Rows of the results of splits.
int64_t split_rows(const AttentionArgs& args) { return args.splits == 1 ? 0 : args.splits * rows_of(args.problem); }

size_t split_bytes(const AttentionArgs& args) {
  return cpu::Workspace::size_of<float>(split_rows(args) * args.problem.value_dim) +
         2 * cpu::Workspace::size_of<float>(split_rows(args));
}

void take_splits(cpu::Workspace& workspace, AttentionArgs& args) {
  args.split_output = workspace.take<float>(split_rows(args) * args.problem.value_dim);
  args.split_maximum = workspace.take<float>(split_rows(args));
  args.split_sum = workspace.take<float>(split_rows(args));
}

// Runs units of a phase, each thread with its own scratch.
void run_phase(AttentionPhase* phase, const AttentionArgs& args, int64_t units, int64_t work, ThreadScratch scratch) {
  for_each_range(units, work, scratch,
                 [&](float* memory, int64_t begin, int64_t end) { phase(args, memory, begin, end); });
}

void merge_splits(const AttentionArgs& args, ThreadScratch scratch) {
  static const auto merge = RUDNN_CHOOSE(attention_merge);
  if (args.splits == 1) return;
  run_phase(merge, args, rows_of(args.problem), split_rows(args) * args.problem.value_dim, scratch);
}

void run_tiles(AttentionArgs args) {
  static const auto scratch_size = RUDNN_CHOOSE(attention_scratch);
  static const auto tiles = RUDNN_CHOOSE(attention_tiles);
  const AttentionProblem& problem = args.problem;
  const int64_t row_tiles = row_tiles_of(problem, kRowTile).count;
  split_keys(row_tiles, args);
  ThreadScratch scratch(scratch_size(problem));
  cpu::Workspace workspace(scratch.bytes() + split_bytes(args));
  take_splits(workspace, args);
  scratch.take(workspace);
  run_phase(tiles, args, problem.batch * problem.key_heads * row_tiles * args.splits, work_of(problem), scratch);
  merge_splits(args, scratch);
}

#if RUDNN_X86_ISAS
struct AcceleratedKernel {
  AttentionScratch* scratch;
  AttentionPhase* pack;
  AttentionPhase* tiles;
  AttentionScratch* few_scratch;
  AttentionPhase* few;
};

AcceleratedKernel accelerated_kernel() {
  if (cpu::has_tiles()) {
    return {&amx::attention_scratch, &amx::attention_pack, &amx::attention_tiles, &amx::attention_few_scratch,
            &amx::attention_few};
  }
  return {&avx512_bf16::attention_scratch, &avx512_bf16::attention_pack, &avx512_bf16::attention_tiles,
          &avx512_bf16::attention_few_scratch, &avx512_bf16::attention_few};
}

void run_few_rows(const AcceleratedKernel& kernel, AttentionArgs args) {
  const AttentionProblem& problem = args.problem;
  split_keys(1, args);
  ThreadScratch scratch(kernel.few_scratch(problem));
  cpu::Workspace workspace(scratch.bytes() + split_bytes(args));
  take_splits(workspace, args);
  scratch.take(workspace);
  // Such a call waits for memory more than it multiplies.
  constexpr int64_t kWorkPerElement = 8;
  run_phase(kernel.few, args, problem.batch * problem.key_heads * args.splits, work_of(problem) * kWorkPerElement,
            scratch);
  merge_splits(args, scratch);
}

void run_accelerated(AttentionArgs args) {
  static const AcceleratedKernel kernel = accelerated_kernel();
  const AttentionProblem& problem = args.problem;
  if (problem.heads / problem.key_heads * problem.queries <= kFewRows) return run_few_rows(kernel, args);
  const int64_t row_tiles = row_tiles_of(problem, kAcceleratedRows).count;
  split_keys(row_tiles, args);
  const auto packed = [](int64_t dim) { return cpu::ceil_div(dim, kPackedDim) * kPackedDim; };
  const int64_t key_heads = problem.batch * problem.key_heads;
  const int64_t chunks = cpu::ceil_div(problem.keys, kKeyChunk);
  // Rows far apart fall into few sets of the cache, so they are copied too.
  const bool copy_all = problem.head_dim % kPackedDim != 0 || problem.key.row_stride != problem.head_dim;
  args.packed_key_chunks = copy_all ? chunks : problem.keys % kKeyChunk == 0 ? 0 : 1;
  const int64_t packed_keys = key_heads * args.packed_key_chunks * kKeyChunk * packed(problem.head_dim);
  const int64_t packed_values = key_heads * chunks * kKeyChunk * packed(problem.value_dim);
  using cpu::Workspace;
  ThreadScratch scratch(kernel.scratch(problem));
  Workspace workspace(scratch.bytes() + split_bytes(args) + Workspace::size_of<bfloat16>(packed_keys) +
                      Workspace::size_of<bfloat16>(packed_values) + Workspace::size_of<uint8_t>(key_heads * chunks));
  take_splits(workspace, args);
  args.packed_keys = workspace.take<bfloat16>(packed_keys);
  args.packed_values = workspace.take<bfloat16>(packed_values);
  args.values_finite = workspace.take<uint8_t>(key_heads * chunks);
  scratch.take(workspace);
  run_phase(kernel.pack, args, key_heads * chunks, 4 * packed_values, scratch);
  run_phase(kernel.tiles, args, key_heads * row_tiles * args.splits, work_of(problem), scratch);
  merge_splits(args, scratch);
}
#endif

}  // namespace

void launch_attention(const AttentionCall& call) {
  const cpu::FloatRow sinks(call.inputs.sinks);
  AttentionArgs args;
  args.problem = problem_of(call.inputs, call.options, sinks.data());
  args.output = call.output->mutable_data_ptr();
  args.lse = static_cast<float*>(call.lse->mutable_data_ptr());
  cpu::advise_huge_pages(call.output);
#if RUDNN_X86_ISAS
  if (call.options.accelerated && args.problem.keys > 0) return run_accelerated(args);
#endif
  run_tiles(args);
}

bool has_matrix_units(DType dtype) { return dtype == DType::kBFloat16 && cpu::isa() >= cpu::Isa::kAvx512Bf16; }

}  // namespace rudnn
