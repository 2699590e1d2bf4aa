// What the launchers of the family have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/metal/launch.h"

namespace rudnn {

inline bool is_long(const Tensor& indices) { return indices.scalar_type() == ScalarType::Long; }

// How the elements of a matrix [rows, width] are shared out among threads: a thread has a vector of 4 or an element of
// each `threads.y * groups.y`-th row.
struct MatrixPlan {
  const char* suffix;  // of the kernel's name
  metal::Size groups, threads;
};

inline MatrixPlan plan_matrix(int64_t rows, int64_t width, bool vectors) {
  constexpr int64_t kThreads = 256, kMostGroups = 65535;
  const int64_t columns = vectors ? width / 4 : width;
  int64_t across = 1;
  while (across < columns && across < kThreads) across *= 2;
  const int64_t down = kThreads / across;
  MatrixPlan plan;
  plan.suffix = vectors ? "_x4" : "_x1";
  plan.threads = {static_cast<uint32_t>(across), static_cast<uint32_t>(down)};
  plan.groups = {groups_of(columns, across), groups_of(std::min(rows, kMostGroups * down), down)};
  return plan;
}

}  // namespace rudnn
