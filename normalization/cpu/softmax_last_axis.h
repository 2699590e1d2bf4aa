// The softmax of a range of rows: y = exp(x - max(x)) / sum(exp(x - max(x))).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous, `width` elements each.
struct SoftmaxArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  const void* input = nullptr;  // [rows, width]
  void* output = nullptr;       // [rows, width]
};

struct SoftmaxBackwardArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  const void* grad = nullptr;    // [rows, width]
  const void* output = nullptr;  // [rows, width], the forward's result
  void* grad_input = nullptr;    // [rows, width]
};

// scratch: float32 [width]; not used, and may be null, for float32 rows.
using SoftmaxRows = void(const SoftmaxArgs& args, int64_t begin, int64_t end, float* scratch);
using SoftmaxBackwardRows = void(const SoftmaxBackwardArgs& args, int64_t begin, int64_t end);

namespace generic {
SoftmaxRows softmax_last_axis_rows;
SoftmaxBackwardRows softmax_last_axis_backward_rows;
}  // namespace generic

namespace avx2 {
SoftmaxRows softmax_last_axis_rows;
SoftmaxBackwardRows softmax_last_axis_backward_rows;
}  // namespace avx2

namespace avx512 {
SoftmaxRows softmax_last_axis_rows;
SoftmaxBackwardRows softmax_last_axis_backward_rows;
}  // namespace avx512

}  // namespace rudnn
