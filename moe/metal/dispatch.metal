// dispatch: a stable counting sort of slots by expert, then a copy of the tokens' rows; and its backward.
#include "metal/dispatch_args.h"
#include "metal/elements.h"

using namespace metal;
using namespace rudnn;

constant bool kLongIndices [[function_constant(kLongIndicesConstant)]];

inline int bucket_at(device const void* indices, long slot, int experts) {
  return index_at(indices, kLongIndices, slot, experts, experts);
}

[[kernel, max_total_threads_per_threadgroup(kSortThreads)]] void count_slots(
    constant DispatchArgs& args [[buffer(kArgsBuffer)]], device const void* indices [[buffer(kIndicesBuffer)]],
    device atomic_int* counts [[buffer(kCountsBuffer)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]]) {
  for (long bucket = index; bucket <= args.experts; bucket += kSortThreads)
    atomic_store_explicit(&counts[bucket * args.blocks + group], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_device);
  const long first = long(group) * args.block;
  const long end = min(first + args.block, long(args.slots));
  for (long slot = first + index; slot < end; slot += kSortThreads) {
    const long bucket = bucket_at(indices, slot, args.experts);
    atomic_fetch_add_explicit(&counts[bucket * args.blocks + group], 1, memory_order_relaxed);
  }
}

// Replaces each count by the sum of those before it. One threadgroup.
[[kernel, max_total_threads_per_threadgroup(kMostScanThreads)]] void scan_counts(
    constant DispatchArgs& args [[buffer(kArgsBuffer)]], device int* counts [[buffer(kCountsBuffer)]],
    device int* expert_offsets [[buffer(kExpertOffsetsBuffer)]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup int totals[kMostScanSimdgroups];
  const long cells = (long(args.experts) + 1) * args.blocks;
  int before = 0;
  for (long chunk = 0; chunk < cells; chunk += threads) {
    const long cell = chunk + index;
    const int count = cell < cells ? counts[cell] : 0;
    const int in_simdgroup = simd_prefix_exclusive_sum(count);
    if (lane == 31) totals[simdgroup] = in_simdgroup + count;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int total = lane < simdgroups ? totals[lane] : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next round writes `totals` again
    const int first = before + simd_sum(lane < simdgroup ? total : 0) + in_simdgroup;
    before += simd_sum(total);
    if (cell >= cells) continue;
    counts[cell] = first;
    if (cell % args.blocks == 0) expert_offsets[cell / args.blocks] = first;
  }
}

[[kernel, max_total_threads_per_threadgroup(kSortThreads)]] void place_slots(
    constant DispatchArgs& args [[buffer(kArgsBuffer)]], device const void* indices [[buffer(kIndicesBuffer)]],
    device int* counts [[buffer(kCountsBuffer)]], device int* row_experts [[buffer(kRowExpertsBuffer)]],
    device int* row_tokens [[buffer(kRowTokensBuffer)]], device int* row_slots [[buffer(kRowSlotsBuffer)]],
    device int* slot_rows [[buffer(kSlotRowsBuffer)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup int buckets[kSortThreads];
  const long first = long(group) * args.block;
  const long end = min(first + args.block, long(args.slots));
  for (long chunk = first; chunk < end; chunk += kSortThreads) {
    const long slot = chunk + index;
    const int bucket = slot < end ? bucket_at(indices, slot, args.experts) : -1;
    buckets[index] = bucket;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    int rank = 0;
    int count = 0;
    for (int other = 0; other < kSortThreads; ++other) {
      const int same = buckets[other] == bucket ? 1 : 0;
      count += same;
      if (other < int(index)) rank += same;
    }
    const long cell = long(bucket) * args.blocks + group;
    const int start = bucket < 0 ? 0 : counts[cell];
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    if (bucket < 0) continue;
    if (rank == count - 1) counts[cell] = start + count;
    const int row = start + rank;
    const bool has_row = bucket < args.experts;
    row_experts[row] = has_row ? bucket : -1;
    row_tokens[row] = has_row ? int(slot / args.choices) : -1;
    row_slots[row] = has_row ? int(slot) : -1;
    slot_rows[slot] = has_row ? row : -1;
  }
}

template <typename T, typename Shape>
[[kernel]] void gather_rows(constant DispatchArgs& args [[buffer(kArgsBuffer)]],
                            device const T* input [[buffer(kInputBuffer)]],
                            device const int* row_tokens [[buffer(kRowTokensBuffer)]],
                            device T* values [[buffer(kValuesBuffer)]], uint2 position [[thread_position_in_grid]],
                            uint2 size [[threads_per_grid]]) {
  using Floats = typename Shape::Floats;
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long row = position.y; row < args.slots; row += size.y) {
    const long token = row_tokens[row];
    Floats moved = Floats(0.0f);
    if (token >= 0) moved = load_floats<Shape>(input + token * args.width + column);
    store_floats<Shape>(values + row * args.width + column, moved);
  }
}

// The sum of the rows of each token.
template <typename T, typename Shape>
[[kernel]] void dispatch_backward(constant DispatchArgs& args [[buffer(kArgsBuffer)]],
                                  device const T* grad_values [[buffer(kValuesBuffer)]],
                                  device const int* slot_rows [[buffer(kSlotRowsBuffer)]],
                                  device T* grad_input [[buffer(kInputBuffer)]],
                                  uint2 position [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  using Floats = typename Shape::Floats;
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long token = position.y; token * args.choices < args.slots; token += size.y) {
    Floats sum = Floats(0.0f);
    for (long slot = token * args.choices; slot < (token + 1) * args.choices; ++slot) {
      const long row = slot_rows[slot];
      if (row < 0 || row >= args.slots) continue;
      sum += load_floats<Shape>(grad_values + row * args.width + column);
    }
    store_floats<Shape>(grad_input + token * args.width + column, sum);
  }
}

MATRIX_INSTANCES(gather_rows, float)
MATRIX_INSTANCES(gather_rows, half)
MATRIX_INSTANCES(gather_rows, bfloat)
MATRIX_INSTANCES(dispatch_backward, float)
MATRIX_INSTANCES(dispatch_backward, half)
MATRIX_INSTANCES(dispatch_backward, bfloat)
