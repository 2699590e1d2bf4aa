// Elements of operands whose type is not the kernel's. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/metal/element_type.h"

namespace rudnn {

inline float element_at(device const void* elements, int type, long position) {
  switch (type) {
    case kFloatElements:
      return static_cast<device const float*>(elements)[position];
    case kHalfElements:
      return float(static_cast<device const half*>(elements)[position]);
    default:
      return float(static_cast<device const bfloat*>(elements)[position]);
  }
}

}  // namespace rudnn
