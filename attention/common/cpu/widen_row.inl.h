#include "common/cpu/widen_row.h"

namespace rudnn::RUDNN_ISA {

void widen_row(const void* row, DType dtype, int64_t length, float* widened) {
  visit_dtype(dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for_each_vector(length, [&](int64_t offset, auto lanes) {
      store(widened + offset, load(static_cast<const T*>(row) + offset, lanes), lanes);
    });
  });
}

}  // namespace rudnn::RUDNN_ISA
