// Checks that the norms share.
#pragma once

#include "common/check.h"

namespace rudnn {

// A float tensor with a last axis to work on. Returns that axis's length.
inline int64_t check_rows(const char* op, const char* argument, const Tensor& tensor) {
  check_float(op, argument, tensor);
  const int64_t width = tensor.dim() > 0 ? tensor.size(-1) : 0;
  if (width < 1) {
    fail_check(op, argument, "must have a last axis of length >= 1, got shape " + describe_shape(shape_of(tensor)));
  }
  return width;
}

// A parameter of one value for each element of a row, float32 or of the rows' dtype.
inline void check_parameter(const char* op, const char* argument, const Tensor& parameter, const Tensor& input,
                            int64_t width) {
  check_float32_or_like(op, argument, parameter, input);
  if (parameter.dim() != 1 || parameter.size(0) != width) check_shape(op, argument, parameter, {width});
  check_same_device(op, argument, parameter, input);
}

// Where the gradient of rows goes: a tensor of their shape, or of shape (0,) if nobody needs it.
inline Tensor empty_row_gradient(const Tensor& rows, bool needed) {
  return needed ? new_empty_like(rows) : new_empty(rows, {0}, rows.scalar_type());
}

// The same for a parameter's, which is float32.
inline Tensor empty_parameter_gradient(const Tensor& rows, int64_t width, bool needed) {
  return new_empty(rows, {needed ? width : 0}, ScalarType::Float);
}

}  // namespace rudnn
