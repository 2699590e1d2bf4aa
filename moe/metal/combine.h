// Combining as a part of other ops.
#pragma once

#include "metal/launch.h"

namespace rudnn {

// The operands of combine (ops/combine.h), with their memory. The expert output is of the output's dtype or float32.
struct CombineOperands {
  int64_t tokens, choices, width;
  DType output_dtype, expert_output_dtype;
  int32_t weight_type;
  metal::Memory expert_output, weights, slot_rows, output;
};

void run_combine(const CombineOperands& operands);

}  // namespace rudnn
