#include "ops/dispatch.h"

#include "metal/dispatch_args.h"
#include "metal/row_map.h"

namespace rudnn {
namespace {

DispatchArgs args_of(int64_t slots, int64_t choices, int64_t width) {
  DispatchArgs args{};
  args.slots = slots;
  args.choices = choices;
  args.width = width;
  return args;
}

// Blocks of whole rounds of a threadgroup's threads, and no more of them than keep a device busy, since each has a
// count for every expert.
void split_into_blocks(DispatchArgs& args) {
  constexpr int64_t kMostBlocks = 128;
  const int64_t rounds = groups_of(args.slots, kSortThreads);
  args.block = groups_of(rounds, kMostBlocks) * int64_t{kSortThreads};
  args.blocks = static_cast<int32_t>(groups_of(args.slots, args.block));
}

void gather_rows(const DispatchCall& call, const metal::Memory& row_tokens) {
  if (call.values->numel() == 0) return;
  const DispatchArgs args = args_of(call.values->size(0), call.indices->size(1), call.values->size(1));
  const DType dtype = dtype_of(*call.input);
  const MatrixPlan plan = plan_matrix(args.slots, args.width, has_aligned_rows(args.width, dtype));
  metal::Launch(instance_of("gather_rows", dtype) + plan.suffix)
      .bytes(kArgsBuffer, args)
      .buffer(kInputBuffer, metal::input_data("input", call.input))
      .buffer(kRowTokensBuffer, row_tokens)
      .buffer(kValuesBuffer, metal::output_data("values", call.values))
      .run(plan.groups, plan.threads);
}

}  // namespace

void run_row_map(const Tensor& indices, int32_t experts, const RowMapMemory& map) {
  DispatchArgs args = args_of(indices.numel(), indices.size(1), 0);
  args.experts = experts;
  split_into_blocks(args);
  const int64_t cells = (int64_t{experts} + 1) * args.blocks;
  const Tensor counts = new_empty(indices, {cells}, ScalarType::Int);
  const metal::Memory counts_memory = metal::scratch_data("counts", &counts);
  const metal::Memory chosen = metal::input_data("indices", &indices);
  metal::Launch("count_slots")
      .bytes(kArgsBuffer, args)
      .constant(kLongIndicesConstant, is_long(indices))
      .buffer(kIndicesBuffer, chosen)
      .buffer(kCountsBuffer, counts_memory)
      .run({static_cast<uint32_t>(args.blocks)}, {kSortThreads});
  const uint32_t scan_threads = 32 * groups_of(std::min(cells, int64_t{kMostScanThreads}), 32);
  metal::Launch("scan_counts")
      .bytes(kArgsBuffer, args)
      .buffer(kCountsBuffer, counts_memory)
      .buffer(kExpertOffsetsBuffer, map.expert_offsets)
      .run({1}, {scan_threads});
  metal::Launch("place_slots")
      .bytes(kArgsBuffer, args)
      .constant(kLongIndicesConstant, is_long(indices))
      .buffer(kIndicesBuffer, chosen)
      .buffer(kCountsBuffer, counts_memory)
      .buffer(kRowExpertsBuffer, map.row_experts)
      .buffer(kRowTokensBuffer, map.row_tokens)
      .buffer(kRowSlotsBuffer, map.row_slots)
      .buffer(kSlotRowsBuffer, map.slot_rows)
      .run({static_cast<uint32_t>(args.blocks)}, {kSortThreads});
}

void launch_dispatch(const DispatchCall& call) {
  if (call.indices->numel() == 0) return zero(*call.map.expert_offsets);
  metal::run_on_device([&] {
    const RowMapMemory map = {
        metal::output_data("expert_offsets", call.map.expert_offsets),
        metal::output_data("row_experts", call.map.row_experts), metal::output_data("row_tokens", call.map.row_tokens),
        metal::output_data("row_slots", call.map.row_slots), metal::output_data("slot_rows", call.map.slot_rows)};
    run_row_map(*call.indices, static_cast<int32_t>(call.map.expert_offsets->numel() - 1), map);
    gather_rows(call, map.row_tokens);
  });
}

void launch_dispatch_backward(const DispatchBackwardCall& call) {
  if (call.slot_rows->numel() == 0) return zero(*call.grad_input);
  metal::run_on_device([&] {
    const DispatchArgs args = args_of(call.slot_rows->numel(), call.slot_rows->size(1), call.grad_input->size(1));
    const DType dtype = dtype_of(*call.grad_input);
    const MatrixPlan plan = plan_matrix(call.grad_input->size(0), args.width, has_aligned_rows(args.width, dtype));
    metal::Launch(instance_of("dispatch_backward", dtype) + plan.suffix)
        .bytes(kArgsBuffer, args)
        .buffer(kValuesBuffer, metal::input_data("grad_values", call.grad_values))
        .buffer(kSlotRowsBuffer, metal::input_data("slot_rows", call.slot_rows))
        .buffer(kInputBuffer, metal::output_data("grad_input", call.grad_input))
        .run(plan.groups, plan.threads);
  });
}

}  // namespace rudnn
