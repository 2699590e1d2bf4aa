// What the lanes of a simdgroup, 32 on every Apple GPU, do together. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace rudnn {

// Over the lanes of a simdgroup, pair by pair: simd_sum promises no order, and so no bits and no bound on its
// roundings.
template <typename V>
inline V simdgroup_sum(V value) {
  for (ushort distance = 1; distance < 32; distance *= 2) value += simd_shuffle_xor(value, distance);
  return value;
}

}  // namespace rudnn
