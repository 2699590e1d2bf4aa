// The scores of a router.
#pragma once

#include "cuda/arguments.cuh"
#include "ops/activation_math.h"

namespace rudnn {

// Softmax over the row of a warp: its largest logit, without NaN, and the sum of the numerators, which is NaN in a row
// that holds NaN or +inf, or nothing but -inf.
struct Softmax {
  float largest;
  float sum;

  __device__ __forceinline__ float numerator(float logit) const { return exponential(logit - largest); }
  __device__ __forceinline__ float score(float logit) const { return numerator(logit) / sum; }
};

// for_each(visit) calls visit(expert, logit) for each expert of this lane.
template <class ForEach>
__device__ __forceinline__ Softmax warp_softmax(ForEach for_each) {
  Softmax softmax{-INFINITY, 0.0f};
  for_each([&](int, float logit) { softmax.largest = fmaxf(softmax.largest, logit); });
  softmax.largest = warp_max(softmax.largest);
  for_each([&](int, float logit) { softmax.sum += softmax.numerator(logit); });
  softmax.sum = warp_sum(softmax.sum);
  return softmax;
}

}  // namespace rudnn
