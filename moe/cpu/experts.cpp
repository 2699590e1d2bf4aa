#include "cpu/experts.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "common/cpu/widen_row.h"
#include "cpu/dispatch.h"
#include "cpu/tensor_indices.h"
#include "cpu/workspace.h"
#include "ops/experts.h"

namespace rudnn {
namespace {

// Rows of a matrix of sums lie this much further apart, so that those of a hidden size that is a power of two do not
// share a few sets of the cache.
constexpr int64_t kSumPadding = 16;

// Whether the system lets this process use the tiles of AMX, for which it wants to be asked once.
bool has_tiles() {
#if RUDNN_X86_ISAS && defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool granted =
      cpu::isa() >= cpu::Isa::kAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

struct ExpertsKernel {
  ExpertsPhase* pack;  // null where the rows are taken as they are
  ExpertsPhase* activated;
  ExpertsPhase* output;
};

ExpertsKernel choose_kernel(bool tensor_core) {
#if RUDNN_X86_ISAS
  if (tensor_core && has_tiles()) return {&amx::experts_pack, &amx::experts_activated, &amx::experts_output};
  if (tensor_core) return {nullptr, &avx512_bf16::experts_activated, &avx512_bf16::experts_output};
#endif
  static const auto activated = RUDNN_CHOOSE(experts_activated);
  static const auto output = RUDNN_CHOOSE(experts_output);
  static_cast<void>(tensor_core);
  return {nullptr, activated, output};
}

ExpertMatrices<const void> matrices_of(const Tensor& weight) { return {weight.const_data_ptr(), weight.stride(0)}; }

ExpertMatrices<float> gradients_of(const Tensor* gradient) {
  if (gradient == nullptr) return {};
  return {static_cast<float*>(gradient->mutable_data_ptr()), gradient->stride(0)};
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <class Args>
void set_weights(const ExpertWeights& weights, Args& args) {
  args.dtype = dtype_of(*weights.down);
  args.hidden = weights.down->size(1);
  args.intermediate = weights.down->size(2);
  args.gate = matrices_of(*weights.gate);
  args.up = matrices_of(*weights.up);
  args.down = matrices_of(*weights.down);
}

int64_t blocks_of(const ExpertGroup& group) { return cpu::ceil_div(group.end - group.begin, kRowBlock); }

int64_t blocks_of(const std::vector<ExpertGroup>& groups) {
  return groups.empty() ? 0 : groups.back().first_block + blocks_of(groups.back());
}

// The groups of all experts from offsets that are not trusted: they come out disjoint and within the rows.
std::vector<ExpertGroup> groups_of(const int32_t* offsets, int64_t experts, int64_t rows) {
  std::vector<ExpertGroup> groups(experts);
  int64_t next = 0, block = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t begin = std::clamp<int64_t>(offsets[expert], next, rows);
    const int64_t end = std::clamp<int64_t>(offsets[expert + 1], begin, rows);
    groups[expert] = {expert, begin, end, block};
    next = end;
    block += blocks_of(groups[expert]);
  }
  return groups;
}

std::vector<ExpertGroup> groups_of(const Tensor& expert_offsets, int64_t rows) {
  return groups_of(static_cast<const int32_t*>(expert_offsets.const_data_ptr()), expert_offsets.numel() - 1, rows);
}

std::vector<ExpertGroup> groups_with_rows(std::vector<ExpertGroup> groups) {
  const auto empty = [](const ExpertGroup& group) { return group.begin == group.end; };
  groups.erase(std::remove_if(groups.begin(), groups.end(), empty), groups.end());
  return groups;
}

// Zeroes the rows that belong to no group.
void clear_other_rows(const std::vector<ExpertGroup>& groups, const Tensor& output) {
  const int64_t rows = output.size(0);
  const size_t row_bytes = static_cast<size_t>(output.size(1)) * output.element_size();
  auto* data = static_cast<char*>(output.mutable_data_ptr());
  int64_t next = 0;
  const auto clear_until = [&](int64_t end) { std::memset(data + next * row_bytes, 0, (end - next) * row_bytes); };
  for (const ExpertGroup& group : groups) {
    clear_until(group.begin);
    next = group.end;
  }
  clear_until(rows);
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
    run(kernel.activated, cpu::ceil_div(args.intermediate, kActivatedBlock) * args.group_count,
        (rows / args.group_count + 1) * 2 * kActivatedBlock * args.hidden);
  }
  run(kernel.output, cpu::ceil_div(args.hidden, kOutputBlock), (rows + 1) * kOutputBlock * args.intermediate);
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

// The mean work of a unit: a block of columns of one group's rows, by so many terms.
int64_t unit_work(const ExpertsBackwardArgs& args, int64_t block, int64_t terms) {
  return (args.rows / args.group_count + 1) * block * terms;
}

// In float32 arithmetic.
void run_backward(ExpertsBackwardArgs args) {
  static const auto widen = RUDNN_CHOOSE(widen_row);
  static const auto grad_activated = RUDNN_CHOOSE(experts_grad_activated);
  static const auto grad_input = RUDNN_CHOOSE(experts_grad_input);
  static const auto grad_gate_up = RUDNN_CHOOSE(experts_grad_gate_up);
  static const auto grad_down = RUDNN_CHOOSE(experts_grad_down);
  using cpu::Workspace;
  const int64_t hidden = args.hidden, intermediate = args.intermediate;
  Workspace workspace(Workspace::size_of<float>(args.rows * hidden) +
                      3 * Workspace::size_of<float>(args.rows * intermediate));
  args.wide_grad = workspace.take<float>(args.rows * hidden);
  args.activated = workspace.take<float>(args.rows * intermediate);
  args.grad_gate_projection = workspace.take<float>(args.rows * intermediate);
  args.grad_up_projection = workspace.take<float>(args.rows * intermediate);

  cpu::parallel_for(args.rows, hidden, [&](int64_t begin, int64_t end) {
    const auto* grad = static_cast<const char*>(args.grad) + begin * hidden * size_of(args.dtype);
    widen(grad, args.dtype, (end - begin) * hidden, args.wide_grad + begin * hidden);
  });
  const auto run = [&](ExpertsBackwardPhase* phase, int64_t columns, int64_t terms) {
    cpu::parallel_for(cpu::ceil_div(columns, kGradientBlock) * args.group_count, unit_work(args, kGradientBlock, terms),
                      [&](int64_t begin, int64_t end) { phase(args, begin, end); });
  };
  run(grad_activated, intermediate, hidden);
  if (args.grad_input != nullptr) run(grad_input, hidden, 2 * intermediate);
  if (args.grad_gate.data == nullptr) return;
  run(grad_gate_up, hidden, 2 * intermediate);
  run(grad_down, intermediate, hidden);
}

#if RUDNN_X86_ISAS
void run_tiled_backward(ExpertsBackwardArgs args, int64_t blocks) {
  using cpu::Workspace;
  const int64_t hidden = args.hidden, intermediate = args.intermediate;
  const int64_t hidden_size = blocks * amx::packed_size(hidden);
  const int64_t intermediate_size = blocks * amx::packed_size(intermediate);
  Workspace workspace(2 * Workspace::size_of<bfloat16>(hidden_size) +
                      5 * Workspace::size_of<bfloat16>(intermediate_size));
  for (void** packed : {&args.right_input, &args.left_grad}) *packed = workspace.take<bfloat16>(hidden_size);
  for (void** packed :
       {&args.right_activated, &args.left_grad_gate, &args.left_grad_up, &args.grad_gate_rows, &args.grad_up_rows}) {
    *packed = workspace.take<bfloat16>(intermediate_size);
  }

  const auto run_units = [&](int64_t width, int64_t terms, const auto& body) {
    cpu::parallel_for(cpu::ceil_div(width, kTileGradientBlock) * args.group_count,
                      unit_work(args, kTileGradientBlock, terms), body);
  };
  const auto run = [&](ExpertsBackwardPhase* phase, int64_t width, int64_t terms) {
    run_units(width, terms, [&](int64_t begin, int64_t end) { phase(args, begin, end); });
  };
  const auto run_with_panels = [&](ExpertsPanelPhase* phase, int64_t width, int64_t terms) {
    struct alignas(64) Line {
      bfloat16 elements[32];
    };
    run_units(width, terms, [&](int64_t begin, int64_t end) {
      std::vector<Line> panels(2 * amx::packed_size(terms) / std::size(Line{}.elements));
      phase(args, panels.data(), begin, end);
    });
  };
  run_with_panels(&amx::experts_grad_activated, intermediate, hidden);
  if (args.grad_input != nullptr) run_with_panels(&amx::experts_grad_input, hidden, intermediate);
  if (args.grad_gate.data == nullptr) return;
  cpu::parallel_for(blocks, kRowBlock * hidden,
                    [&](int64_t begin, int64_t end) { amx::experts_grad_pack(args, begin, end); });
  run(&amx::experts_grad_gate_up, intermediate, 2 * hidden);
  run(&amx::experts_grad_down, hidden, intermediate);
}
#endif

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
  clear_other_rows(groups, *call.output);
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

void launch_experts_backward(const ExpertsBackwardCall& call) {
  const int64_t rows = call.values->size(0);
  const std::vector<ExpertGroup> groups = groups_of(*call.expert_offsets, rows);
  ExpertsBackwardArgs args;
  set_weights(call.weights, args);
  args.rows = rows;
  args.groups = groups.data();
  args.group_count = static_cast<int64_t>(groups.size());
  args.grad = call.grad->const_data_ptr();
  args.input = call.values->const_data_ptr();
  args.gate_projection = call.gate_projection->const_data_ptr();
  args.up_projection = call.up_projection->const_data_ptr();
  args.grad_input = mutable_data_or_null(call.grad_values);
  args.grad_gate = gradients_of(call.grad_weights.gate);
  args.grad_up = gradients_of(call.grad_weights.up);
  args.grad_down = gradients_of(call.grad_weights.down);
  cpu::advise_huge_pages(call.grad_values);
  cpu::advise_huge_pages(call.grad_weights.gate);
  cpu::advise_huge_pages(call.grad_weights.up);
  cpu::advise_huge_pages(call.grad_weights.down);
  if (call.grad_values != nullptr) clear_other_rows(groups, *call.grad_values);
#if RUDNN_X86_ISAS
  if (call.tensor_core && has_tiles()) return run_tiled_backward(args, blocks_of(groups));
#endif
  run_backward(args);
}

bool has_tensor_core(DType dtype) { return dtype == DType::kBFloat16 && cpu::isa() >= cpu::Isa::kAvx512Bf16; }

}  // namespace rudnn
