// The RMS norms of a range of rows: y = x / sqrt(mean(x^2) + epsilon) * (gamma + gamma_offset) [* activation(gate)].
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "ops/gate.h"

namespace rudnn {

// Rows are contiguous, `width` elements each. Pointers marked optional may be null.
struct RmsNormArgs {
  DType dtype = DType::kFloat32;  // of all rows
  int64_t width = 0;
  double epsilon = 0;
  float gamma_offset = 0;          // 1 for zero-centred parameters
  const void* input = nullptr;     // [rows, width]
  const void* residual = nullptr;  // [rows, width], optional: then x = input + residual, rounded to dtype
  const void* gate = nullptr;      // [rows, width], optional
  GateActivation activation = GateActivation::kSilu;
  const float* gamma = nullptr;  // [width]
  void* output = nullptr;        // [rows, width]
  void* sum = nullptr;           // [rows, width], input + residual; there if residual is
};

struct RmsNormBackwardArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  double epsilon = 0;
  float gamma_offset = 0;
  const void* grad = nullptr;      // [rows, width]
  const void* grad_sum = nullptr;  // [rows, width], optional: added to grad_input
  const void* input = nullptr;     // [rows, width], what was normalised
  const void* gate = nullptr;      // [rows, width], optional
  GateActivation activation = GateActivation::kSilu;
  const float* gamma = nullptr;  // [width]
  void* grad_input = nullptr;    // [rows, width], optional
  void* grad_gate = nullptr;     // [rows, width], optional
};

using RmsNormRows = void(const RmsNormArgs& args, int64_t begin, int64_t end);
// grad_gamma, optional: [width], to which the rows' contributions are added in order.
using RmsNormBackwardRows = void(const RmsNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma);

namespace generic {
RmsNormRows rms_norm_rows;
RmsNormBackwardRows rms_norm_backward_rows;
}  // namespace generic

namespace avx2 {
RmsNormRows rms_norm_rows;
RmsNormBackwardRows rms_norm_backward_rows;
}  // namespace avx2

namespace avx512 {
RmsNormRows rms_norm_rows;
RmsNormBackwardRows rms_norm_backward_rows;
}  // namespace avx512

}  // namespace rudnn
