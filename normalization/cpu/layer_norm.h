// The layer norms of a range of rows: y = (x - mean(x)) / sqrt(variance(x) + epsilon) * gamma + beta.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous, `width` elements each. Pointers marked optional may be null.
struct LayerNormArgs {
  DType dtype = DType::kFloat32;  // of all rows
  int64_t width = 0;
  double epsilon = 0;
  const void* input = nullptr;     // [rows, width]
  const void* residual = nullptr;  // [rows, width], optional: then x = input + residual, rounded to dtype
  const float* gamma = nullptr;    // [width]
  const float* beta = nullptr;     // [width], optional
  void* output = nullptr;          // [rows, width]
  void* sum = nullptr;             // [rows, width], input + residual; there if residual is
};

struct LayerNormBackwardArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  double epsilon = 0;
  const void* grad = nullptr;      // [rows, width]
  const void* grad_sum = nullptr;  // [rows, width], optional: added to grad_input
  const void* input = nullptr;     // [rows, width], what was normalised
  const float* gamma = nullptr;    // [width]
  void* grad_input = nullptr;      // [rows, width], optional
};

using LayerNormRows = void(const LayerNormArgs& args, int64_t begin, int64_t end);
// grad_gamma and grad_beta, each optional: [width], to which the rows' contributions are added in order.
using LayerNormBackwardRows = void(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma,
                                   float* grad_beta);

namespace generic {
LayerNormRows layer_norm_rows;
LayerNormBackwardRows layer_norm_backward_rows;
}  // namespace generic

namespace avx2 {
LayerNormRows layer_norm_rows;
LayerNormBackwardRows layer_norm_backward_rows;
}  // namespace avx2

namespace avx512 {
LayerNormRows layer_norm_rows;
LayerNormBackwardRows layer_norm_backward_rows;
}  // namespace avx512

}  // namespace rudnn
