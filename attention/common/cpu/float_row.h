// A row of parameters in float32.
#pragma once

#include <vector>

#include "common/tensor.h"

namespace rudnn::cpu {

// The elements of a contiguous float tensor in float32: the tensor's own memory where that is float32, else a widened
// copy. The tensor must outlive it.
class FloatRow {
 public:
  // For a null tensor, a parameter that is missing, data() is null.
  explicit FloatRow(const Tensor* tensor);
  FloatRow(const FloatRow&) = delete;
  FloatRow& operator=(const FloatRow&) = delete;

  const float* data() const { return data_; }

 private:
  std::vector<float> copy_;
  const float* data_ = nullptr;
};

}  // namespace rudnn::cpu
