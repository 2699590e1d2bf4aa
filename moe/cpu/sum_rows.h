// The sum of each token's rows.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// output[t] = the sum over j of weights[t, j] * input[slot_rows[t, j]], in float32 and in the order of j, rounded once.
// A slot whose row is outside [0, R) adds nothing. Null weights are 1. `output` has at least one element.
void sum_rows(const Tensor& input, const float* weights, const Tensor& slot_rows, const Tensor& output);

}  // namespace rudnn
