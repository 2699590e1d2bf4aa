// What launchers and shaders of softmax_last_axis agree on.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace rudnn {

struct SoftmaxArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
};

}  // namespace rudnn
