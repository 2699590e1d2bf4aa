// Ranks: a score and an expert in one integer, so that the best of several is their maximum. The higher score ranks
// higher, of equal ones the lower expert; NaN ranks below every number. Every rank is above 0.
#pragma once

#include "cuda/arguments.cuh"
#include "ops/ranking.h"

namespace rudnn {

using Rank = unsigned long long;
constexpr Rank kHighestRank = ~Rank{0};

__device__ __forceinline__ Rank rank_of(float score, int expert) {
  return Rank{rank_of(score)} << 32 | static_cast<unsigned>(~expert);
}
__device__ __forceinline__ float score_of(Rank rank) {
  const unsigned ordered = static_cast<unsigned>(rank >> 32);
  return float_from_bits(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
__device__ __forceinline__ int expert_of(Rank rank) { return static_cast<int>(~static_cast<unsigned>(rank)); }

__device__ __forceinline__ Rank warp_best(Rank rank) {
  return warp_reduce(rank, [](Rank a, Rank b) { return a > b ? a : b; });
}

// The higher of two ranks, of which `candidate` counts only below `bound`.
__device__ __forceinline__ Rank better_below(Rank bound, Rank best, Rank candidate) {
  return candidate < bound && candidate > best ? candidate : best;
}

}  // namespace rudnn
