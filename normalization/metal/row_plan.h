// How many threads a launch gives to a row, and how many threadgroups to a grid: from the shape.
#pragma once

#include <algorithm>
#include <cstdint>

#include "metal/row_limits.h"

namespace rudnn {

struct RowPlan {
  bool vectors;        // accesses of kVectorElements, else of single elements
  bool simdgroup_row;  // a simdgroup has a row, else a threadgroup
  int64_t threadgroups;
  int64_t threads;  // of a threadgroup
};

// What a thread keeps of a row.
struct RowBudget {
  int vectors;
  int elements;
};
constexpr RowBudget kForwardBudget = {kForwardVectors, kForwardElements};
constexpr RowBudget kBackwardBudget = {kBackwardVectors, kBackwardElements};

// Teams of threads in the grid, each of which has a row at a time.
inline int64_t teams(const RowPlan& plan) {
  return plan.threadgroups * (plan.simdgroup_row ? int64_t{kRowsPerThreadgroup} : 1);
}

// Rows that a simdgroup can hold need no barrier, so more of them are in flight; wider ones have as many threads as
// hold them. More threadgroups than any device runs at once gain nothing: the rest of the rows is strided over.
inline RowPlan plan_rows(int64_t rows, int64_t width, const RowBudget& budget) {
  constexpr int64_t kMostThreadgroups = 4096;
  RowPlan plan;
  plan.vectors = width % kVectorElements == 0;
  const int64_t vectors = plan.vectors ? width / kVectorElements : width;
  const int64_t held = plan.vectors ? budget.vectors : budget.elements;
  const int64_t simdgroups = (vectors + kSimdgroupSize * held - 1) / (kSimdgroupSize * held);
  plan.simdgroup_row = simdgroups == 1;
  plan.threads = kSimdgroupSize *
                 (plan.simdgroup_row ? int64_t{kRowsPerThreadgroup} : std::min(simdgroups, int64_t{kMostSimdgroups}));
  const int64_t rows_at_once = plan.simdgroup_row ? int64_t{kRowsPerThreadgroup} : 1;
  plan.threadgroups = std::min((rows + rows_at_once - 1) / rows_at_once, kMostThreadgroups);
  return plan;
}

// The same where sums over the rows are wanted. Each team leaves a partial row of float32 for every parameter, so it is
// given at least 16 rows; a thousand teams keep a device busy.
inline RowPlan plan_summed_rows(int64_t rows, int64_t width, const RowBudget& budget) {
  constexpr int64_t kLeastRows = 16, kMostTeams = 1024;
  return plan_rows(std::clamp((rows + kLeastRows - 1) / kLeastRows, int64_t{1}, kMostTeams), width, budget);
}

}  // namespace rudnn
