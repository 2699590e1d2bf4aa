#include <iterator>
#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "common/cpu/tiles.h"
#include "common/cpu/widen_row.h"
#include "common/cpu/workspace.h"
#include "cpu/expert_groups.h"
#include "cpu/experts.h"
#include "ops/experts.h"

namespace rudnn {
namespace {

// What a gradient of a weight is to be written to.
void set_gradient(const Tensor* gradient, ExpertMatrices<void>& matrices, ExpertsBackwardArgs& args) {
  if (gradient == nullptr) return;
  matrices = {gradient->mutable_data_ptr(), gradient->stride(0)};
  args.rounded = gradient->scalar_type() != ScalarType::Float;
}

bool needs_gate_or_up(const ExpertsBackwardArgs& args) {
  return args.grad_gate.data != nullptr || args.grad_up.data != nullptr;
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
  if (needs_gate_or_up(args)) run(grad_gate_up, hidden, 2 * intermediate);
  if (args.grad_down.data != nullptr) run(grad_down, intermediate, hidden);
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
  if (!needs_gate_or_up(args) && args.grad_down.data == nullptr) return;
  cpu::parallel_for(blocks, kRowBlock * hidden,
                    [&](int64_t begin, int64_t end) { amx::experts_grad_pack(args, begin, end); });
  if (needs_gate_or_up(args)) run(&amx::experts_grad_gate_up, intermediate, 2 * hidden);
  if (args.grad_down.data != nullptr) run(&amx::experts_grad_down, hidden, intermediate);
}
#endif

}  // namespace

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
  set_gradient(call.grad_weights.gate, args.grad_gate, args);
  set_gradient(call.grad_weights.up, args.grad_up, args);
  set_gradient(call.grad_weights.down, args.grad_down, args);
  cpu::advise_huge_pages(call.grad_values);
  cpu::advise_huge_pages(call.grad_weights.gate);
  cpu::advise_huge_pages(call.grad_weights.up);
  cpu::advise_huge_pages(call.grad_weights.down);
  clear_other_rows(groups, call.grad_values);
#if RUDNN_X86_ISAS
  if (call.tensor_core && cpu::has_tiles()) return run_tiled_backward(args, blocks_of(groups));
#endif
  run_backward(args);
}

}  // namespace rudnn
