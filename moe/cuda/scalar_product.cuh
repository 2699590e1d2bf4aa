// A tile of a product on the float32 units, for every dtype.
#pragma once

#include "common/cuda/scalar_stage.cuh"
#include "cuda/grouped_tile.cuh"

namespace rudnn {

// 256 threads compute 64 x 128 elements, 4 x 8 each, and read 16 elements of the summed axis at a time. A thread has
// the columns 4 * x to 4 * x + 3 of the left half of the tile, and the same of the right half.
struct ScalarTile {
  static constexpr int kRows = 64, kColumns = 128, kDepth = 16;
  static constexpr int kThreads = 256, kLeastBlocks = 2;
  static constexpr int kPairRun = 64;  // columns of a pair's first matrix, before those of its second
  static constexpr size_t kSharedBytes = 2 * kDepth * (kRows + kColumns) * sizeof(float);

  static constexpr int kRun = 4;
  using Sums = float[kRun][2 * kRun];
};

// sums = the product of the problem's tile: over all steps, in the order of the summed axis.
template <class T, class Problem>
__device__ __forceinline__ void multiply(const Problem& problem, ScalarTile, ScalarTile::Sums& sums,
                                         unsigned char* shared) {
  constexpr int kRows = ScalarTile::kRows, kColumns = ScalarTile::kColumns, kDepth = ScalarTile::kDepth;
  constexpr int kRun = ScalarTile::kRun, kThreadColumns = kColumns / 2 / kRun;
  float* const stages = reinterpret_cast<float*>(shared);
  constexpr int kStage = kDepth * (kRows + kColumns);
  using Left = ScalarStage<T, kRows, ScalarTile::kThreads>;
  using Right = ScalarStage<T, kColumns, ScalarTile::kThreads>;
  static_assert(Left::kDepth == kDepth, "stages hold one step");
  Left left;
  Right right;
  const int row = threadIdx.x / kThreadColumns * kRun, column = threadIdx.x % kThreadColumns * kRun;
  const int steps = problem.steps();
  const auto load = [&](int step) {
    left.template load<Problem::kLeftAlongRows>(problem.left(step), problem.vectors());
    right.template load<Problem::kRightAlongRows>(problem.right(step), problem.vectors());
  };
  if (steps > 0) load(0);
  for (int step = 0; step < steps; ++step) {
    float* const left_tile = stages + step % 2 * kStage;
    float* const right_tile = left_tile + kDepth * kRows;
    left.template store<Problem::kLeftAlongRows>(left_tile);
    right.template store<Problem::kRightAlongRows>(right_tile);
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      float a[kRun], b[2 * kRun];
      load_floats(a, left_tile + Left::position(depth, row));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto run = load_vec<kRun>(right_tile + Right::position(depth, half * kColumns / 2 + column));
#pragma unroll
        for (int j = 0; j < kRun; ++j) b[half * kRun + j] = run[j];
      }
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int j = 0; j < 2 * kRun; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
  }
}

// Calls visit(row in the tile, column in the tile, kRun neighbouring sums), or for a problem of pairs
// visit(row, column of both, sums of the first, sums of the second).
template <bool kPaired, class Visit>
__device__ __forceinline__ void for_each_run(ScalarTile, const ScalarTile::Sums& sums, Visit visit) {
  constexpr int kRun = ScalarTile::kRun, kHalf = ScalarTile::kColumns / 2, kThreadColumns = kHalf / kRun;
  const int row = threadIdx.x / kThreadColumns * kRun, column = threadIdx.x % kThreadColumns * kRun;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    float runs[2][kRun];
#pragma unroll
    for (int j = 0; j < 2 * kRun; ++j) runs[j / kRun][j % kRun] = sums[i][j];
    if constexpr (kPaired) {
      visit(row + i, column, runs[0], runs[1]);
    } else {
      visit(row + i, column, runs[0]);
      visit(row + i, kHalf + column, runs[1]);
    }
  }
}

}  // namespace rudnn
