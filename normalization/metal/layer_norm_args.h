// What launchers and shaders of layer_norm and fused_add_layer_norm agree on.
#pragma once

#include "metal/fixed_width.h"

namespace rudnn {

struct LayerNormArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
  float epsilon;
  float root_epsilon;  // its square root
};

}  // namespace rudnn
