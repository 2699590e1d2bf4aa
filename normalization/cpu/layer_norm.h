// The layer norms of a range of rows: y = (x - mean(x)) / sqrt(variance(x) + epsilon) * gamma + beta.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous, `width` elements each. Pointers marked optional may be null.
struct LayerNormArgs {
  DType dtype;        // of everything but gamma and beta
  DType gamma_dtype;  // float32 or dtype
  DType beta_dtype;   // float32 or dtype
  int64_t width;
  double epsilon;
  const void* input;     // [rows, width]
  const void* residual;  // [rows, width], optional: then x = input + residual, rounded to dtype
  const void* gamma;     // [width]
  const void* beta;      // [width], optional
  void* output;          // [rows, width]
  void* sum;             // [rows, width], input + residual; there if residual is
};

struct LayerNormBackwardArgs {
  DType dtype;
  DType gamma_dtype;
  int64_t width;
  double epsilon;
  const void* grad;      // [rows, width]
  const void* grad_sum;  // [rows, width], optional: added to grad_input
  const void* input;     // [rows, width], what was normalised
  const void* gamma;     // [width]
  void* grad_input;      // [rows, width], optional
};

// scratch: float32 [2 * width], for a gamma and a beta that are not float32.
using LayerNormRows = void(const LayerNormArgs& args, int64_t begin, int64_t end, float* scratch);
// scratch: float32 [width]. grad_gamma and grad_beta, each optional: float32 [width], to which the rows' contributions
// are added in order.
using LayerNormBackwardRows = void(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* scratch,
                                   float* grad_gamma, float* grad_beta);

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
