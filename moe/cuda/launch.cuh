// What the launchers have in common.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/call.h"
#include "cuda/arguments.cuh"

namespace rudnn {

inline Indices indices_data(const char* name, const Tensor* tensor) {
  return {cuda::input_data(name, tensor), tensor->scalar_type() == ScalarType::Long};
}
inline Factors factors_data(const char* name, const Tensor* tensor) {
  return {cuda::input_data(name, tensor), dtype_of(*tensor)};
}

// A grid of blocks of kWarpsPerBlock warps, at least `warps` of them.
inline LaunchConfig warp_grid(int64_t warps, Stream stream) {
  return {blocks_of(ceil_divide(warps, kWarpsPerBlock)), dim3(kWarpsPerBlock * kWarpSize), 0, stream};
}

// A grid that gives each Piece<kVector> of a matrix a warp.
template <int kVector>
LaunchConfig piece_grid(int64_t rows, int64_t width, Stream stream) {
  return warp_grid(rows * ceil_divide(width, Piece<kVector>::kElements), stream);
}

// Calls visit(TypeTag<T>, kVector) with the elements of a vector: of 16 bytes if a row of `width` holds a whole number
// of them, else one.
template <class Visit>
void visit_vectors(DType dtype, int64_t width, Visit&& visit) {
  visit_dtype(dtype, [&](auto type) {
    constexpr int kBytes = sizeof(typename decltype(type)::type);
    if (is_whole_vectors(width, kBytes))
      visit(type, std::integral_constant<int, 16 / kBytes>{});
    else
      visit(type, std::integral_constant<int, 1>{});
  });
}

}  // namespace rudnn
