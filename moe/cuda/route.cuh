// route: softmax over all experts, and the best of them.
#pragma once

#include "cuda/ranking.cuh"
#include "cuda/scores.cuh"
#include "ops/scoring.h"

namespace rudnn {

struct RouteArgs {
  int64_t tokens;
  int experts;
  int top_k;
  bool renormalize;
  const void* logits;  // [tokens, experts]
  int32_t* indices;    // [tokens, top_k]
  void* weights;       // [tokens, top_k]
};

// A lane's share of a row: the experts lane, lane + 32, ... It keeps kHeld of them in registers, enough for the row, or
// with kHeld = 0 reads it again each time.
template <class T, int kHeld>
class LaneLogits {
 public:
  __device__ __forceinline__ LaneLogits(const T* row, int experts) : row_(row), experts_(experts) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int expert = warp_lane() + i * kWarpSize;
      held_[i] = expert < experts ? to_float(row[expert]) : -INFINITY;
    }
  }

  // Calls visit(expert, logit).
  template <class Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int expert = warp_lane() + i * kWarpSize;
        if (expert < experts_) visit(expert, held_[i]);
      }
    } else {
      for (int64_t expert = warp_lane(); expert < experts_; expert += kWarpSize)
        visit(static_cast<int>(expert), to_float(row_[expert]));
    }
  }

  // Calls visit(expert, score). Held logits have become scores, by `keep_scores`.
  template <class Visit>
  __device__ __forceinline__ void for_each_score(const Softmax& softmax, Visit visit) const {
    for_each([&](int expert, float value) { visit(expert, kHeld > 0 ? value : softmax.score(value)); });
  }
  __device__ __forceinline__ void keep_scores(const Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held_[i] = softmax.score(held_[i]);
  }

 private:
  const T* row_;
  int experts_;
  float held_[kHeld > 0 ? kHeld : 1];
};

template <class T, int kHeld>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize, kLeastBlocks) route(RouteArgs args) {
  const int64_t token = grid_warp();
  if (token >= args.tokens) return;
  const int lane = warp_lane();
  const T* row = static_cast<const T*>(args.logits) + token * args.experts;
  int32_t* indices = args.indices + token * args.top_k;
  T* weights = static_cast<T*>(args.weights) + token * args.top_k;

  LaneLogits<T, kHeld> logits(row, args.experts);
  const Softmax softmax = warp_softmax([&](auto visit) { logits.for_each(visit); });
  if (isnan(softmax.sum)) {
    for (int64_t j = lane; j < args.top_k; j += kWarpSize) {
      indices[j] = static_cast<int32_t>(j);
      weights[j] = from_float<T>(NAN);
    }
    return;
  }

  logits.keep_scores(softmax);
  Rank last = kHighestRank;
  float sum = kRenormalizeEpsilon;
  for (int j = 0; j < args.top_k; ++j) {
    Rank best = 0;
    logits.for_each_score(softmax,
                          [&](int expert, float score) { best = better_below(last, best, rank_of(score, expert)); });
    last = warp_best(best);
    sum += score_of(last);
    if (lane == j % kWarpSize) indices[j] = expert_of(last);
  }
  const float divisor = args.renormalize ? sum : 1.0f;
  // The lane reads what it wrote itself.
  for (int64_t j = lane; j < args.top_k; j += kWarpSize)
    weights[j] = from_float<T>(softmax.score(to_float(row[indices[j]])) / divisor);
}

}  // namespace rudnn
