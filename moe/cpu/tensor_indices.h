// Reading an index tensor.
#pragma once

#include "common/tensor.h"
#include "cpu/indices.h"

namespace rudnn {

// The elements of a contiguous tensor of int32 or int64.
inline Indices indices_of(const Tensor& indices) {
  return {indices.const_data_ptr(), indices.scalar_type() == ScalarType::Long};
}

}  // namespace rudnn
