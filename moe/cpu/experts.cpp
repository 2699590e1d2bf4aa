#include "cpu/experts.h"

#include <algorithm>
#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "common/cpu/tiles.h"
#include "common/cpu/workspace.h"
#include "cpu/dispatch.h"
#include "cpu/expert_groups.h"
#include "cpu/tensor_indices.h"
#include "ops/experts.h"

namespace rudnn {
namespace {

// Rows of a matrix of sums lie this much further apart, so that those of a hidden size that is a power of two do not
// share a few sets of the cache.
constexpr int64_t kSumPadding = 16;

struct ExpertsKernel {
  ExpertsPhase* pack;  // null where the rows are taken as they are
  ExpertsPhase* activated;
  ExpertsPhase* output;
  int64_t block;  // rows of weights of a unit
};

ExpertsKernel choose_kernel(bool tensor_core) {
#if RUDNN_X86_ISAS
  if (tensor_core && cpu::has_tiles()) {
    return {&amx::experts_pack, &amx::experts_activated, &amx::experts_output, kTileBlock};
  }
  if (tensor_core) return {nullptr, &avx512_bf16::experts_activated, &avx512_bf16::experts_output, kDotBlock};
#endif
  static const auto activated = RUDNN_CHOOSE(experts_activated);
  static const auto output = RUDNN_CHOOSE(experts_output);
  static_cast<void>(tensor_core);
  return {nullptr, activated, output, kDotBlock};
}

std::vector<ExpertGroup> groups_with_rows(std::vector<ExpertGroup> groups) {
  const auto empty = [](const ExpertGroup& group) { return group.begin == group.end; };
  groups.erase(std::remove_if(groups.begin(), groups.end(), empty), groups.end());
  return groups;
}

// Runs the phases of a kernel on args that lack its scratch memory.
void run_kernel(const ExpertsKernel& kernel, ExpertsArgs args, int64_t rows, int64_t blocks) {
  using cpu::Workspace;
  const bool packed = kernel.pack != nullptr;
  const int64_t element_size = size_of(args.dtype);
  const int64_t input_bytes = packed ? blocks * amx::packed_size(args.hidden) * element_size : 0;
  const int64_t activated_bytes =
      (packed ? blocks * amx::packed_size(args.intermediate) : rows * args.intermediate) * element_size;
  args.sum_stride = cpu::ceil_div(args.hidden, kSumPadding) * kSumPadding + kSumPadding;
  Workspace workspace(Workspace::size_of<char>(input_bytes) + Workspace::size_of<char>(activated_bytes) +
                      Workspace::size_of<float>(args.tokens * args.sum_stride));
  args.packed_input = workspace.take<char>(input_bytes);
  args.activated = workspace.take<char>(activated_bytes);
  if (args.row_tokens != nullptr) args.sums = workspace.take<float>(args.tokens * args.sum_stride);

  const auto run = [&](ExpertsPhase* phase, int64_t units, int64_t work) {
    cpu::parallel_for(units, work, [&](int64_t begin, int64_t end) { phase(args, begin, end); });
  };
  if (packed) run(kernel.pack, blocks, kRowBlock * args.hidden);
  if (args.group_count > 0) {
    run(kernel.activated, cpu::ceil_div(args.intermediate, kernel.block / 2) * args.group_count,
        (rows / args.group_count + 1) * kernel.block * args.hidden);
  }
  run(kernel.output, cpu::ceil_div(args.hidden, kernel.block), (rows + 1) * kernel.block * args.intermediate);
}

// Rows sorted by expert, and for each expert in the order of tokens and of their choices.
struct SortedRows {
  std::vector<ExpertGroup> groups;
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};

SortedRows sort_rows(const Tensor& indices, const Tensor& weights, int64_t experts) {
  const int64_t slots = indices.numel();
  SortedRows sorted;
  sorted.tokens.resize(slots);
  std::vector<int32_t> offsets(experts + 1), row_slots(slots), slot_rows(slots);
  sort_slots({indices_of(indices), slots, indices.size(1), experts, offsets.data(), nullptr, sorted.tokens.data(),
              row_slots.data(), slot_rows.data()});
  sorted.groups = groups_with_rows(groups_of(offsets.data(), experts, slots));
  const cpu::FloatRow slot_weights(&weights);
  sorted.weights.resize(offsets[experts]);
  for (size_t row = 0; row < sorted.weights.size(); ++row) {
    sorted.weights[row] = slot_weights.data()[row_slots[row]];
  }
  return sorted;
}

}  // namespace

void launch_experts(const ExpertsCall& call) {
  const std::vector<ExpertGroup> groups = groups_with_rows(groups_of(*call.expert_offsets, call.values->size(0)));
  const int64_t rows = call.values->size(0);
  ExpertsArgs args;
  set_weights(call.weights, args);
  args.groups = groups.data();
  args.group_count = static_cast<int64_t>(groups.size());
  args.input = call.values->const_data_ptr();
  args.gate_projection = mutable_data_or_null(call.gate_projection);
  args.up_projection = mutable_data_or_null(call.up_projection);
  args.output = call.output->mutable_data_ptr();
  cpu::advise_huge_pages(call.output);
  cpu::advise_huge_pages(call.gate_projection);
  cpu::advise_huge_pages(call.up_projection);
  clear_other_rows(groups, call.output);
  clear_other_rows(groups, call.gate_projection);
  clear_other_rows(groups, call.up_projection);
  run_kernel(choose_kernel(call.tensor_core), args, rows, blocks_of(groups));
}

void launch_fused_experts(const FusedExpertsCall& call) {
  const SortedRows sorted = sort_rows(*call.indices, *call.weights, call.expert_weights.down->size(0));
  const auto rows = static_cast<int64_t>(sorted.weights.size());
  ExpertsArgs args;
  set_weights(call.expert_weights, args);
  args.groups = sorted.groups.data();
  args.group_count = static_cast<int64_t>(sorted.groups.size());
  args.input = call.input->const_data_ptr();
  args.row_tokens = sorted.tokens.data();
  args.row_weights = sorted.weights.data();
  args.tokens = call.input->size(0);
  args.output = call.output->mutable_data_ptr();
  cpu::advise_huge_pages(call.output);
  run_kernel(choose_kernel(call.tensor_core), args, rows, blocks_of(sorted.groups));
}

bool has_tensor_core(DType dtype) { return dtype == DType::kBFloat16 && cpu::isa() >= cpu::Isa::kAvx512Bf16; }

}  // namespace rudnn
