// Widening a row of any float type to float32.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

using WidenRow = void(const void* row, DType dtype, int64_t length, float* widened);

namespace generic {
WidenRow widen_row;
}  // namespace generic

namespace avx2 {
WidenRow widen_row;
}  // namespace avx2

namespace avx512 {
WidenRow widen_row;
}  // namespace avx512

}  // namespace rudnn
