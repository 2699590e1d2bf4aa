// Sorting slots by expert (ops/dispatch.h says what slots and rows are).
#pragma once

#include <cstdint>

#include "cpu/indices.h"

namespace rudnn {

struct SlotSort {
  Indices indices;  // [slots]
  int64_t slots = 0;
  int64_t top_k = 0;  // slots of a token
  int64_t experts = 0;
  int32_t* expert_offsets = nullptr;  // [experts + 1]
  int32_t* row_experts = nullptr;     // [slots], optional
  int32_t* row_tokens = nullptr;      // [slots], optional
  int32_t* row_slots = nullptr;       // [slots]
  int32_t* slot_rows = nullptr;       // [slots]
};

// Fills the maps: rows in the order of their expert, and of the slot within an expert. A slot whose index is outside
// [0, experts) has row -1; the rows from expert_offsets[experts] on have expert, token and slot -1.
void sort_slots(const SlotSort& sort);

}  // namespace rudnn
