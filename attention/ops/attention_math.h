// What becomes of single scores, and the keys of a query. Compiled as CUDA and as Metal.
#pragma once

#include "common/device_function.h"

namespace rudnn {

// A score before mask and bias. A softcap of 0 is none.
RUDNN_DEVICE float score_of(float product, float scale, float softcap) {
  const float score = product * scale;
  return softcap == 0.0f ? score : softcap * hyperbolic_tangent(score / softcap);
}

// The derivative of such a score by scale * product.
RUDNN_DEVICE float score_slope(float score, float softcap) {
  if (softcap == 0.0f) return 1.0f;
  const float ratio = score / softcap;
  return 1.0f - ratio * ratio;
}

// e^(a - b), in which what rounding the difference loses is made up for; 0 where a is -inf.
RUDNN_DEVICE float exponential_of_difference(float a, float b) {
  if (a == -INFINITY) return 0.0f;
  const float difference = a - b;
  const float subtracted = a - difference;
  const float lost = (a - (difference + subtracted)) + (subtracted - b);
  const float power = exponential(difference);
  return power + power * lost;
}

// What weights are relative to, given the largest score: 0 if there is none.
RUDNN_DEVICE float softmax_base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// The keys that causality and a window leave to the queries.
struct KeyRange {
  int64_t first;
  int64_t last;
};
struct KeyWindow {
  int64_t queries;
  int64_t keys;
  int64_t keys_before;
  int64_t keys_after;

  RUDNN_DEVICE KeyRange keys_of(int64_t query) const {
    const int64_t position = query + keys - queries;
    int64_t first = position - keys_before;
    if (first < 0) first = 0;
    int64_t last = position + keys_after + 1;
    if (last > keys) last = keys;
    if (last < first) last = first;
    return {first, last};
  }
};

}  // namespace rudnn
