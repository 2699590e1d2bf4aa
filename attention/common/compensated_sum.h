// Sums of many float32 values that may nearly cancel, on devices without float64. Compiled as CUDA and as Metal.
#pragma once

#include "common/device_function.h"

namespace rudnn {

// A sum, and what its roundings have lost.
struct CompensatedSum {
  float value;
  float lost;
};

RUDNN_DEVICE CompensatedSum added(CompensatedSum sum, float x) {
  const float value = sum.value + x;
  const float moved = value - sum.value;
  return {value, sum.lost + ((sum.value - (value - moved)) + (x - moved))};
}

RUDNN_DEVICE CompensatedSum added(CompensatedSum sum, CompensatedSum other) {
  sum = added(sum, other.value);
  return {sum.value, sum.lost + other.lost};
}

// Of an infinite sum nothing is known to be lost.
RUDNN_DEVICE float rounded(CompensatedSum sum) {
  return sum.lost - sum.lost == 0.0f ? sum.value + sum.lost : sum.value;
}

}  // namespace rudnn
