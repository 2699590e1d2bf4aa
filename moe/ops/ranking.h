// The order in which routers choose: larger scores first, among equals the lower id, NaN as -inf. Compiled as CUDA and
// as Metal.
#pragma once

#include "common/device_function.h"

namespace rudnn {

struct Ranked {
  uint32_t rank;
  int id;
};

// Larger for larger scores, and at least 1. NaN counts as -inf, and the two zeros are equal.
RUDNN_DEVICE uint32_t rank_of(float score) {
  if (score != score) score = -INFINITY;
  const uint32_t bits = float_bits(score + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

RUDNN_DEVICE bool precedes(Ranked a, Ranked b) { return a.rank > b.rank || (a.rank == b.rank && a.id < b.id); }

// What precedes everything, and what everything precedes.
RUDNN_DEVICE Ranked before_all() { return {0xffffffffu, -1}; }
RUDNN_DEVICE Ranked after_all() { return {0u, 0x7fffffff}; }

}  // namespace rudnn
