// Gradients of a norm's parameters: sums over all rows, in an order that depends on the shape alone.
#pragma once

#include "common/compensated_sum.h"
#include "cuda/row.cuh"

namespace rudnn {

// Where the threads of a row leave the sums over their rows. A row of threads has a partial row of its own, so partials
// is [rows of threads in the grid, width] float32; null if the sums are not wanted.
template <class Shape>
class ParameterSum {
 public:
  __device__ __forceinline__ ParameterSum(float* partials, int64_t width) : width_(width) {
    wanted_ = partials != nullptr;
    if (!wanted_) return;
    partial_ = partials + first_row<Shape>() * width;
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      const float zeros[Shape::kVector] = {};
      if (slot == kNotHeld) store_floats(partial_ + offset, zeros);
    });
#pragma unroll
    for (int slot = 0; slot < Shape::kHeld; ++slot)
#pragma unroll
      for (int i = 0; i < Shape::kVector; ++i) held_[slot][i] = 0.0f;
  }

  __device__ __forceinline__ bool wanted() const { return wanted_; }

  __device__ __forceinline__ void add(const float (&values)[Shape::kVector], int slot, int64_t offset) {
    if (slot != kNotHeld) {
#pragma unroll
      for (int i = 0; i < Shape::kVector; ++i) held_[slot][i] += values[i];
      return;
    }
    float sums[Shape::kVector];
    load_floats(sums, partial_ + offset);
#pragma unroll
    for (int i = 0; i < Shape::kVector; ++i) sums[i] += values[i];
    store_floats(partial_ + offset, sums);
  }

  __device__ __forceinline__ void store() {
    if (!wanted_) return;
    for_each_vector<Shape>(width_, [&](int slot, int64_t offset) {
      if (slot != kNotHeld) store_floats(partial_ + offset, held_[slot]);
    });
  }

 private:
  int64_t width_;
  bool wanted_;
  float* partial_;
  float held_[Shape::kHeld][Shape::kVector];
};

// sums [width] = partials [count, width] summed over the first axis. A block has kColumns x kShares threads, which
// share out the rows of kColumns columns.
template <int kColumns, int kShares>
__global__ void __launch_bounds__(kColumns* kShares)
    sum_partials(const float* partials, int64_t count, int64_t width, float* sums) {
  __shared__ float values[kShares][kColumns], lost[kShares][kColumns];
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  CompensatedSum sum = {0.0f, 0.0f};
  if (column < width)
    for (int64_t row = threadIdx.y; row < count; row += kShares) sum = added(sum, partials[row * width + column]);
  values[threadIdx.y][threadIdx.x] = sum.value;
  lost[threadIdx.y][threadIdx.x] = sum.lost;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
  for (int share = 1; share < kShares; ++share)
    sum = added(sum, CompensatedSum{values[share][threadIdx.x], lost[share][threadIdx.x]});
  sums[column] = rounded(sum);
}

}  // namespace rudnn
