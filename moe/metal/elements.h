// Elements of operands whose type is not the kernel's, and instances over elements. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/device_function.h"
#include "common/metal/elements.h"
#include "common/metal/instance.h"
#include "common/metal/vectors.h"

namespace rudnn {

// An index of 32 or 64 bits, or `none` if it is outside [0, count).
inline int index_at(device const void* indices, bool is_long, long position, int count, int none) {
  const long index = is_long ? static_cast<device const long*>(indices)[position]
                             : long(static_cast<device const int*>(indices)[position]);
  return index >= 0 && index < count ? int(index) : none;
}

}  // namespace rudnn

// The instances of a kernel that moves single elements or vectors of them.
#define MATRIX_INSTANCES(function, T)                    \
  INSTANCE(function##_##T##_x4, function, T, Vectors<4>) \
  INSTANCE(function##_##T##_x1, function, T, Vectors<1>)
