// Which rows belong to which expert, and which tile of them a threadgroup has. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "metal/experts_args.h"

namespace rudnn {

// Made by plan_rows: first rows [E + 1], the last one being the end, and first tiles [E + 1].
struct RowPlan {
  device const int* first_rows;
  device const int* first_tiles;
  int experts;

  int tiles() const { return first_tiles[experts]; }
};

inline RowPlan plan_at(device const int* plan, int experts) { return {plan, plan + experts + 1, experts}; }

struct RowTile {
  int expert;
  long first;
  long end;
};

// The last expert whose first tile is not beyond `tile`. The lanes of a simdgroup look at 32 experts at a time.
inline int expert_of(RowPlan plan, int tile, uint lane) {
  int first = 0;
  int count = plan.experts;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int offset = int(lane) * step;
    const bool is_not_beyond = offset < count && plan.first_tiles[first + offset] <= tile;
    const int chosen = (simd_sum(is_not_beyond ? 1 : 0) - 1) * step;
    first += chosen;
    count = min(step, count - chosen);
  }
  return first;
}

inline RowTile row_tile_of(RowPlan plan, int tile, uint lane) {
  const int expert = expert_of(plan, tile, lane);
  const long first = plan.first_rows[expert] + long(tile - plan.first_tiles[expert]) * kTileRows;
  return {expert, first, min(first + kTileRows, long(plan.first_rows[expert + 1]))};
}

}  // namespace rudnn
