// The activation of one half of a row times the other half, for a range of rows (ops/gated_activation.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "ops/activation.h"

namespace rudnn {

// Rows are contiguous. `width` is that of a half.
struct GatedActivationArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  Activation activation = Activation::kSilu;
  const void* input = nullptr;  // [rows, 2 * width]
  void* output = nullptr;       // [rows, width]; the forward's
  const void* grad = nullptr;   // [rows, width]; the backward's
  void* grad_input = nullptr;   // [rows, 2 * width]; the backward's
};

using GatedActivationRows = void(const GatedActivationArgs& args, int64_t begin, int64_t end);

namespace generic {
GatedActivationRows gated_activation_rows;
GatedActivationRows gated_activation_backward_rows;
}  // namespace generic

namespace avx2 {
GatedActivationRows gated_activation_rows;
GatedActivationRows gated_activation_backward_rows;
}  // namespace avx2

namespace avx512 {
GatedActivationRows gated_activation_rows;
GatedActivationRows gated_activation_backward_rows;
}  // namespace avx512

}  // namespace rudnn
