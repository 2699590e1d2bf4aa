#include "common/cpu/float_row.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/widen_row.h"

namespace rudnn::cpu {

FloatRow::FloatRow(const Tensor* tensor) {
  static const auto widen = RUDNN_CHOOSE(widen_row);
  if (tensor == nullptr) return;
  const DType dtype = dtype_of(*tensor);
  if (dtype == DType::kFloat32) {
    data_ = static_cast<const float*>(tensor->const_data_ptr());
    return;
  }
  copy_.resize(tensor->numel());
  widen(tensor->const_data_ptr(), dtype, tensor->numel(), copy_.data());
  data_ = copy_.data();
}

}  // namespace rudnn::cpu
