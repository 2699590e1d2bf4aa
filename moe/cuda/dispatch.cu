#include <algorithm>

#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/launch.cuh"
#include "ops/dispatch.h"

namespace rudnn {
namespace {

// At least a few rounds of a warp, at most as many chunks as one block can scan soon, and no more counts than twice the
// slots or buckets.
int64_t slots_per_chunk(int64_t slots, int64_t buckets) {
  constexpr int64_t kLeastSlots = 256, kMostChunks = 256;
  const int64_t size = std::max({kLeastSlots, ceil_divide(slots, kMostChunks), buckets});
  return ceil_divide(size, kWarpSize) * kWarpSize;
}

int32_t* map_data(const char* name, const Tensor* tensor) {
  return static_cast<int32_t*>(cuda::output_data(name, tensor));
}

void sort_slots(const DispatchCall& call, const int32_t*& row_tokens, Stream stream) {
  SortArgs args;
  args.slots = call.indices->numel();
  args.top_k = call.indices->size(1);
  args.experts = call.map.expert_offsets->numel() - 1;
  args.chunk_slots = slots_per_chunk(args.slots, args.experts + 1);
  args.chunks = ceil_divide(args.slots, args.chunk_slots);
  args.indices = indices_data("indices", call.indices);
  args.expert_offsets = map_data("expert_offsets", call.map.expert_offsets);
  args.row_experts = map_data("row_experts", call.map.row_experts);
  args.row_tokens = map_data("row_tokens", call.map.row_tokens);
  args.row_slots = map_data("row_slots", call.map.row_slots);
  args.slot_rows = map_data("slot_rows", call.map.slot_rows);
  row_tokens = args.row_tokens;
  const Tensor counts = new_empty(*call.input, {args.chunks, args.experts + 1}, ScalarType::Int);
  args.counts = static_cast<int32_t*>(cuda::scratch_data("counts", &counts));
  const dim3 grid(static_cast<unsigned>(ceil_divide(args.chunks, kSortWarps)),
                  static_cast<unsigned>(ceil_divide(args.experts + 1, kBucketTile)));
  const LaunchConfig warps{grid, dim3(kSortWarps * kWarpSize), 0, stream};
  if (args.chunks > 0) launch(count_slots, warps, args);
  launch(scan_counts, {dim3(1), dim3(kScanThreads), 0, stream}, args);
  if (args.chunks > 0) launch(place_slots, warps, args);
}

}  // namespace

void launch_dispatch(const DispatchCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    GatherArgs args;
    args.rows = call.values->size(0);
    args.width = call.values->size(1);
    sort_slots(call, args.row_tokens, stream);
    if (call.values->numel() == 0) return;
    args.input = cuda::input_data("input", call.input);
    args.values = cuda::output_data("values", call.values);
    visit_vectors(dtype_of(*call.input), args.width, [&](auto type, auto vector) {
      launch(gather_rows<typename decltype(type)::type, vector()>, piece_grid<vector()>(args.rows, args.width, stream),
             args);
    });
  });
}

// The rows of a token's slots are summed as in combine, without weights.
void launch_dispatch_backward(const DispatchBackwardCall& call) {
  cuda::run_on_device(*call.grad_values, [&](Stream stream) {
    CombineArgs args{};
    args.tokens = call.slot_rows->size(0);
    args.rows = call.grad_values->size(0);
    args.width = call.grad_values->size(1);
    args.top_k = call.slot_rows->size(1);
    args.slot_rows = static_cast<const int32_t*>(cuda::input_data("slot_rows", call.slot_rows));
    args.row_values = cuda::input_data("grad_values", call.grad_values);
    args.output = cuda::output_data("grad_input", call.grad_input);
    visit_vectors(dtype_of(*call.grad_values), args.width, [&](auto type, auto vector) {
      launch(sum_slots<typename decltype(type)::type, vector()>, piece_grid<vector()>(args.tokens, args.width, stream),
             args);
    });
  });
}

}  // namespace rudnn
