// The RMS norms of a range of rows: y = x / sqrt(mean(x^2) + epsilon) * (gamma + gamma_offset) [* activation(gate)].
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "ops/gate.h"

namespace rudnn {

// Rows are contiguous, `width` elements each. Pointers marked optional may be null.
struct RmsNormArgs {
  DType dtype;        // of everything but gamma
  DType gamma_dtype;  // float32 or dtype
  int64_t width;
  double epsilon;
  float gamma_offset;    // 1 for zero-centred parameters, else 0
  const void* input;     // [rows, width]
  const void* residual;  // [rows, width], optional: then x = input + residual, rounded to dtype
  Gate gate_activation;
  const void* gate;   // [rows, width], unless gate_activation is kNone
  const void* gamma;  // [width]
  void* output;       // [rows, width]
  void* sum;          // [rows, width], input + residual; there if residual is
};

struct RmsNormBackwardArgs {
  DType dtype;
  DType gamma_dtype;
  int64_t width;
  double epsilon;
  float gamma_offset;
  const void* grad;      // [rows, width]
  const void* grad_sum;  // [rows, width], optional: added to grad_input
  const void* input;     // [rows, width], what was normalised
  Gate gate_activation;
  const void* gate;   // [rows, width], unless gate_activation is kNone
  const void* gamma;  // [width]
  void* grad_input;   // [rows, width], optional
  void* grad_gate;    // [rows, width], optional
};

// scratch: float32 [width], for a gamma that is not float32.
using RmsNormRows = void(const RmsNormArgs& args, int64_t begin, int64_t end, float* scratch);
// grad_gamma, optional: float32 [width], to which the rows' contributions are added in order.
using RmsNormBackwardRows = void(const RmsNormBackwardArgs& args, int64_t begin, int64_t end, float* scratch,
                                 float* grad_gamma);

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
