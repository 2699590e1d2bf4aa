// Making the map of rows (ops/dispatch.h) as a part of other ops.
#pragma once

#include "metal/launch.h"

namespace rudnn {

struct RowMapMemory {
  metal::Memory expert_offsets, row_experts, row_tokens, row_slots, slot_rows;
};

// Of indices [T, k], at least one.
void run_row_map(const Tensor& indices, int32_t experts, const RowMapMemory& map);

}  // namespace rudnn
