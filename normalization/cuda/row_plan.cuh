// How many threads a launch gives to a row, and how many rows of threads to a grid: from shape and dtype.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/row.cuh"
#include "ops/row_grid.h"

namespace rudnn {

struct RowPlan {
  bool vectors;  // 16-byte accesses, else single elements
  int threads;   // for a row: a warp, or a block of kNarrowBlock or the kernel's widest
  int64_t blocks;
};

constexpr int kNarrowBlock = 256;

inline int64_t rows_per_block(const RowPlan& plan) { return plan.threads == kWarpSize ? kWarpsPerBlock : 1; }

// A kernel's share of the register file: bytes of each row that a thread holds, and the largest block this allows.
template <int held_bytes, int widest_block>
struct RowBudget {
  static constexpr int kWidestBlock = widest_block;
  static constexpr int held(bool vectors) { return held_bytes / (vectors ? 16 : 8); }
};
using ForwardBudget = RowBudget<64, 512>;
using BackwardBudget = RowBudget<32, 512>;  // two rows, and sums for the parameters

// Rows that a warp can hold need no barrier, so more of them are in flight.
template <class Budget>
RowPlan plan_rows(int64_t rows, int64_t width, int64_t element_bytes) {
  RowPlan plan;
  plan.vectors = width * element_bytes % 16 == 0;
  const int64_t vectors = plan.vectors ? width * element_bytes / 16 : width;
  const int64_t held = Budget::held(plan.vectors);
  plan.threads = vectors <= kWarpSize * held      ? kWarpSize
                 : vectors <= kNarrowBlock * held ? kNarrowBlock
                                                  : Budget::kWidestBlock;
  plan.blocks = blocks_for(rows, rows_per_block(plan));
  return plan;
}

// Calls visit(RowShape) with the shape that the plan asks for.
template <class T, class Budget, class Visit>
void visit_row_shape(const RowPlan& plan, Visit&& visit) {
  const auto with_vector = [&](auto vectors) {
    constexpr int kVector = vectors() ? 16 / sizeof(T) : 1, kHeld = Budget::held(vectors());
    if (plan.threads == kWarpSize)
      visit(RowShape<kVector, kWarpSize, kHeld>{});
    else if (plan.threads == kNarrowBlock)
      visit(RowShape<kVector, kNarrowBlock, kHeld>{});
    else
      visit(RowShape<kVector, Budget::kWidestBlock, kHeld>{});
  };
  if (plan.vectors)
    with_vector(std::true_type{});
  else
    with_vector(std::false_type{});
}

}  // namespace rudnn
