// route_sigmoid_grouped: sigmoid scores, a choice of groups, and the best experts of those.
#pragma once

#include "cuda/ranking.cuh"
#include "cuda/scores.cuh"
#include "ops/limits.h"
#include "ops/scoring.h"

namespace rudnn {

constexpr int kMostGroupsPerLane = kMostGroups / kWarpSize;
constexpr int kMostChosenPerLane = kMostGroupedTopK / kWarpSize;

struct RouteSigmoidGroupedArgs {
  int64_t tokens;
  int experts;
  int top_k;   // at most kMostGroupedTopK
  int groups;  // at most kMostGroups
  int selected_groups;
  bool group_top_two;
  bool renormalize;
  float scale;
  const void* logits;  // [tokens, experts]
  const float* bias;   // [experts], optional
  int32_t* indices;    // [tokens, top_k]
  void* weights;       // [tokens, top_k]
};

// The ranks of a token's experts, in the shared memory of its warp. A gap after each group lets lanes walk through one
// group each without conflicts.
struct GroupedRanks {
  Rank* ranks;
  int group_size;

  __device__ __forceinline__ Rank& at(int group, int i) const { return ranks[group * (group_size + 1) + i]; }
  __device__ __forceinline__ Rank& operator[](int expert) const { return ranks[expert + expert / group_size]; }
};
inline int grouped_ranks_bytes(int experts, int groups) { return static_cast<int>(sizeof(Rank)) * (experts + groups); }

// The score of a group, with the group in place of an expert.
__device__ __forceinline__ Rank rank_group(const GroupedRanks& ranks, int group, bool top_two) {
  Rank best = 0, second = 0;
  for (int i = 0; i < ranks.group_size; ++i) {
    const Rank rank = ranks.at(group, i);
    second = max(second, min(best, rank));
    best = max(best, rank);
  }
  return rank_of(top_two ? score_of(best) + score_of(second) : score_of(best), group);
}

// Takes the experts of all but the selected groups out of the choice.
__device__ __forceinline__ void drop_groups(const GroupedRanks& ranks, const RouteSigmoidGroupedArgs& args) {
  const int lane = warp_lane();
  Rank held[kMostGroupsPerLane];
#pragma unroll
  for (int i = 0; i < kMostGroupsPerLane; ++i) {
    const int group = lane + i * kWarpSize;
    held[i] = group < args.groups ? rank_group(ranks, group, args.group_top_two) : 0;
  }
  Rank last = kHighestRank;
  for (int selected = 0; selected < args.selected_groups; ++selected) {
    Rank best = 0;
#pragma unroll
    for (int i = 0; i < kMostGroupsPerLane; ++i) best = better_below(last, best, held[i]);
    last = warp_best(best);
  }
#pragma unroll
  for (int i = 0; i < kMostGroupsPerLane; ++i) {
    const int group = lane + i * kWarpSize;
    if (group >= args.groups || held[i] >= last) continue;
    for (int j = 0; j < ranks.group_size; ++j) ranks.at(group, j) = 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) route_sigmoid_grouped(RouteSigmoidGroupedArgs args) {
  DYNAMIC_SHARED(shared);
  const int64_t token = grid_warp();
  if (token >= args.tokens) return;
  const int lane = warp_lane(), warp = threadIdx.x / kWarpSize;
  const T* row = static_cast<const T*>(args.logits) + token * args.experts;
  const GroupedRanks ranks{reinterpret_cast<Rank*>(shared) + warp * (args.experts + args.groups),
                           args.experts / args.groups};

  bool has_nan = false;
  for (int expert = lane; expert < args.experts; expert += kWarpSize) {
    const float logit = to_float(row[expert]);
    has_nan |= isnan(logit);
    const float bias = args.bias != nullptr ? args.bias[expert] : 0.0f;
    ranks[expert] = rank_of(sigmoid(logit) + bias, expert);
  }
  has_nan = __any_sync(kFullMask, has_nan);
  __syncwarp();
  drop_groups(ranks, args);
  __syncwarp();

  int chosen[kMostChosenPerLane] = {};
  Rank last = kHighestRank;
  for (int j = 0; j < args.top_k; ++j) {
    Rank best = 0;
    for (int expert = lane; expert < args.experts; expert += kWarpSize) best = better_below(last, best, ranks[expert]);
    last = warp_best(best);
#pragma unroll
    for (int i = 0; i < kMostChosenPerLane; ++i)
      if (j == lane + i * kWarpSize) chosen[i] = expert_of(last);
  }

  float scores[kMostChosenPerLane], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostChosenPerLane; ++i) {
    scores[i] = sigmoid(to_float(row[chosen[i]]));
    if (lane + i * kWarpSize < args.top_k) sum += scores[i];
  }
  const float divisor = args.renormalize ? warp_sum(sum) + kRenormalizeEpsilon : 1.0f;
#pragma unroll
  for (int i = 0; i < kMostChosenPerLane; ++i) {
    const int j = lane + i * kWarpSize;
    if (j >= args.top_k) continue;
    args.indices[token * args.top_k + j] = chosen[i];
    const float weight = scores[i] / divisor * args.scale;
    static_cast<T*>(args.weights)[token * args.top_k + j] = from_float<T>(has_nan ? NAN : weight);
  }
}

}  // namespace rudnn
