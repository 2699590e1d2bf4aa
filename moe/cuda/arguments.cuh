// Arguments that come in several dtypes, and how warps share out the elements of rows.
#pragma once

#include "common/cuda/operand.cuh"

namespace rudnn {

// Experts of tokens, of a dtype that is known when the kernel runs.
struct Indices {
  const void* data;
  bool is_int64;

  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

constexpr int kWarpsPerBlock = 4;
// Of a multiprocessor, for kernels with much to keep: 512 threads may have 128 registers each. Left to itself, ptxas
// spills a few of them to fit more threads.
constexpr int kLeastBlocks = 4;

// Which warp of the grid this one is.
__device__ __forceinline__ int64_t grid_warp() {
  return int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
}

// A warp's share of a matrix: a piece of one row, of which each lane has kVectorsPerLane vectors of kVector elements.
constexpr int kVectorsPerLane = 4;
template <int kVector>
class Piece {
 public:
  static constexpr int kElements = kVectorsPerLane * kWarpSize * kVector;

  __device__ __forceinline__ Piece(int64_t rows, int64_t width) : width_(width) {
    const int64_t pieces = (width + kElements - 1) / kElements;
    row_ = grid_warp() / pieces;
    first_ = grid_warp() % pieces * kElements + warp_lane() * kVector;
    if (row_ >= rows) width_ = 0;
  }

  // False for a warp past the last row.
  __device__ __forceinline__ bool exists() const { return width_ > 0; }
  __device__ __forceinline__ int64_t row() const { return row_; }

  // Calls visit(slot, offset in the row) for each vector of this lane.
  template <class Visit>
  __device__ __forceinline__ void for_each_vector(Visit visit) const {
#pragma unroll
    for (int slot = 0; slot < kVectorsPerLane; ++slot) {
      const int64_t offset = first_ + slot * kWarpSize * kVector;
      if (offset < width_) visit(slot, offset);
    }
  }

 private:
  int64_t width_;
  int64_t row_;
  int64_t first_;
};

}  // namespace rudnn
