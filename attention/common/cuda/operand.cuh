// Matrices that tiles of products are read from and written to.
#pragma once

#include "common/cuda/device.cuh"

namespace rudnn {

// Floating-point elements of a dtype that is known when the kernel runs.
struct Factors {
  const void* data;
  DType dtype;

  __device__ __forceinline__ float operator[](int64_t i) const {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
    if (dtype == DType::kFloat16) return to_float(static_cast<const float16*>(data)[i]);
    return to_float(static_cast<const bfloat16*>(data)[i]);
  }
};

// Stores an element of such a dtype.
__device__ __forceinline__ void store_as(DType dtype, void* elements, int64_t i, float value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(elements)[i] = value;
  else if (dtype == DType::kFloat16)
    static_cast<float16*>(elements)[i] = from_float<float16>(value);
  else
    static_cast<bfloat16*>(elements)[i] = from_float<bfloat16>(value);
}

// A row-major matrix; outside of it all elements count as 0.
template <class T>
struct Matrix {
  const T* data;
  int64_t pitch;
  int64_t rows;
  int64_t columns;

  __device__ __forceinline__ const T* row(int64_t r) const { return r < rows ? data + r * pitch : nullptr; }
};

// The part of an operand that a step of a product reads, from this row and column on.
template <class Operand>
struct Slice {
  Operand operand;
  int64_t row;
  int64_t column;
};
template <class Operand>
__device__ __forceinline__ Slice<Operand> slice(Operand operand, int64_t row, int64_t column) {
  return {operand, row, column};
}

// kVector elements of a row that may end among them, or be missing.
template <int kVector, class T>
__device__ __forceinline__ Vec<T, kVector> load_ragged(const T* row, int64_t column, int64_t columns) {
  Vec<T, kVector> out{};
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (row != nullptr && column + i < columns) out[i] = row[column + i];
  return out;
}

// Stores kRun neighbouring elements of a row that has `columns`.
template <class T, int kRun>
__device__ __forceinline__ void store_run(T* row, int64_t column, int64_t columns, const float (&run)[kRun],
                                          bool vectors) {
  if (vectors) {
    if (column < columns) store_floats(row + column, run);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (column + i < columns) row[column + i] = from_float<T>(run[i]);
  }
}

}  // namespace rudnn
