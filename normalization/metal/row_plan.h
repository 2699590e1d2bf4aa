// How many threads a launch gives to a row, and how many threadgroups to a grid: from the shape.
#pragma once

#include <algorithm>
#include <cstdint>

#include "metal/row_limits.h"
#include "ops/row_grid.h"

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

inline int64_t rows_per_threadgroup(const RowPlan& plan) { return plan.simdgroup_row ? kRowsPerThreadgroup : 1; }

// Rows that a simdgroup can hold need no barrier, so more of them are in flight; wider ones have as many threads as
// hold them.
inline RowPlan plan_rows(int64_t rows, int64_t width, const RowBudget& budget) {
  RowPlan plan;
  plan.vectors = width % kVectorElements == 0;
  const int64_t vectors = plan.vectors ? width / kVectorElements : width;
  const int64_t held = plan.vectors ? budget.vectors : budget.elements;
  const int64_t simdgroups = (vectors + kSimdgroupSize * held - 1) / (kSimdgroupSize * held);
  plan.simdgroup_row = simdgroups == 1;
  plan.threads = kSimdgroupSize *
                 (plan.simdgroup_row ? int64_t{kRowsPerThreadgroup} : std::min(simdgroups, int64_t{kMostSimdgroups}));
  plan.threadgroups = blocks_for(rows, rows_per_threadgroup(plan));
  return plan;
}

}  // namespace rudnn
