// Operands of products on the float32 units in shared memory, for every dtype.
#pragma once

#include "common/cuda/operand.cuh"

namespace rudnn {

// kDepth x kExtent elements of an operand as float32 in shared memory, sums' axis first. Groups of 8 columns are
// permuted by depth, so that the stores of a transposed operand meet no bank twice.
template <class T, int kExtent, int kThreads>
class ScalarStage {
 public:
  static constexpr int kDepth = 16, kRun = 4;
  static constexpr int kRuns = kDepth * kExtent / kRun / kThreads;  // of each thread
  static constexpr int kElements = kDepth * kExtent;

  // Reads a slice into registers. If the summed axis runs along the rows of the operand, it is transposed.
  template <bool kAlongRows, class Operand>
  __device__ __forceinline__ void load(const Slice<Operand>& slice, bool vectors) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const Place place = place_of<kAlongRows>(i);
      const T* row = slice.operand.row(slice.row + place.row);
      const int64_t column = slice.column + place.column, columns = slice.operand.columns;
      if (vectors && row != nullptr && column < columns)
        runs_[i] = load_vec<kRun>(row + column);
      else
        runs_[i] = load_ragged<kRun>(row, column, columns);
    }
  }

  template <bool kAlongRows>
  __device__ __forceinline__ void store(float* shared) const {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const Place place = place_of<kAlongRows>(i);
      Vec<float, kRun> run;
#pragma unroll
      for (int j = 0; j < kRun; ++j) run[j] = to_float(runs_[i][j]);
      if constexpr (kAlongRows) {
#pragma unroll
        for (int j = 0; j < kRun; ++j) shared[position(place.column + j, place.row)] = run[j];
      } else {
        store_vec(shared + position(place.row, place.column), run);
      }
    }
  }

  static __device__ __forceinline__ int position(int depth, int column) {
    return depth * kExtent + (column ^ (depth / kRun % 4 * 8));
  }

 private:
  struct Place {
    int row;
    int column;
  };
  template <bool kAlongRows>
  static __device__ __forceinline__ Place place_of(int i) {
    constexpr int kRunsPerRow = (kAlongRows ? kDepth : kExtent) / kRun;
    const int run = threadIdx.x + i * kThreads;
    return {run / kRunsPerRow, run % kRunsPerRow * kRun};
  }

  Vec<T, kRun> runs_[kRuns];
};

}  // namespace rudnn
