// A token's scores and choices, by a simdgroup all of whose lanes call these together. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/metal/instance.h"
#include "common/metal/simdgroup.h"
#include "metal/router_limits.h"
#include "ops/activation_math.h"
#include "ops/ranking.h"

namespace rudnn {

// What turns the logits of a row into their softmax. The sum is NaN if the row holds NaN or +inf, or nothing but -inf.
struct Softmax {
  float maximum;
  float sum;

  bool is_nan() const { return sum != sum; }
  float score(float logit) const { return exponential(logit - maximum) / sum; }
};

template <typename T>
inline Softmax softmax_of(device const T* logits, int experts, uint lane) {
  float maximum = -INFINITY;
  for (int expert = lane; expert < experts; expert += kSimdgroupSize)
    maximum = precise::fmax(maximum, float(logits[expert]));  // NaN is left out, and comes back in the sum
  maximum = simd_max(maximum);
  float sum = 0.0f;
  for (int expert = lane; expert < experts; expert += kSimdgroupSize)
    sum += exponential(float(logits[expert]) - maximum);
  return {maximum, simdgroup_sum(sum)};
}

// The first of the lanes' candidates.
inline Ranked first_of_simdgroup(Ranked candidate) {
  const uint rank = simd_max(candidate.rank);
  return {rank, simd_min(candidate.rank == rank ? candidate.id : after_all().id)};
}

// The earlier one of `best` and a candidate that comes after `previous`.
inline Ranked earliest_after(Ranked previous, Ranked candidate, Ranked best) {
  return precedes(previous, candidate) && precedes(candidate, best) ? candidate : best;
}

}  // namespace rudnn
