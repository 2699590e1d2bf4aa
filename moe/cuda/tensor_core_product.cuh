// A tile of a product on the tensor cores, for float16 and bfloat16.
#pragma once

#include "common/cuda/tensor_core_stage.cuh"
#include "cuda/grouped_tile.cuh"

namespace rudnn {

// kRowWarps x kColumnWarps warps compute kRows x kColumns elements, and read 32 elements of the summed axis at a time.
// While they multiply one stage, the next ones are being copied.
template <int rows, int columns, int row_warps, int column_warps, int least_blocks>
struct TensorCoreTile {
  static constexpr int kRows = rows, kColumns = columns, kDepth = 32;
  static constexpr int kThreads = row_warps * column_warps * kWarpSize, kLeastBlocks = least_blocks;
  static constexpr int kStages = 3;
  static constexpr int kPairRun = 8;  // neighbouring fragments are of the first and the second matrix of a pair
  static constexpr int kStageElements = kDepth * (kRows + kColumns);
  static constexpr size_t kSharedBytes = kStages * kStageElements * 2;

  static constexpr int kColumnWarps = column_warps;
  static constexpr int kWarpRows = rows / row_warps, kWarpColumns = columns / column_warps;
  static constexpr int kRowFragments = kWarpRows / 16, kColumnFragments = kWarpColumns / 8;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "fragments of columns are loaded in pairs");
  using Sums = float[kRowFragments][kColumnFragments][4];
};

// The warp's corner in the tile.
template <class Tile>
__device__ __forceinline__ int warp_row() {
  return static_cast<int>(threadIdx.x) / kWarpSize / Tile::kColumnWarps * Tile::kWarpRows;
}
template <class Tile>
__device__ __forceinline__ int warp_column() {
  return static_cast<int>(threadIdx.x) / kWarpSize % Tile::kColumnWarps * Tile::kWarpColumns;
}

// Adds the products of one stage.
template <class T, class Problem, class Tile>
__device__ __forceinline__ void multiply_stage(float (&sums)[Tile::kRowFragments][Tile::kColumnFragments][4],
                                               const T* left_stage, const T* right_stage) {
  using Left = FragmentLoader<T, Tile::kRows, Tile::kDepth, Problem::kLeftAlongRows>;
  using Right = FragmentLoader<T, Tile::kColumns, Tile::kDepth, Problem::kRightAlongRows>;
#pragma unroll
  for (int depth = 0; depth < Tile::kDepth; depth += 16) {
    uint32_t a[Tile::kRowFragments][4];
#pragma unroll
    for (int i = 0; i < Tile::kRowFragments; ++i) Left::left(a[i], left_stage, warp_row<Tile>() + 16 * i, depth);
#pragma unroll
    for (int j = 0; j < Tile::kColumnFragments; j += 2) {
      uint32_t pair[4];
      Right::right(pair, right_stage, warp_column<Tile>() + 8 * j, depth);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t b[2] = {pair[2 * half], pair[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < Tile::kRowFragments; ++i) mma_m16n8k16<T>(sums[i][j + half], a[i], b);
      }
    }
  }
}

// sums += the product of the problem's tile: over all steps, in the order of the summed axis.
template <class T, class Problem, int r, int c, int rw, int cw, int l>
__device__ __forceinline__ void multiply(const Problem& problem, TensorCoreTile<r, c, rw, cw, l>,
                                         typename TensorCoreTile<r, c, rw, cw, l>::Sums& sums, unsigned char* shared) {
  using Tile = TensorCoreTile<r, c, rw, cw, l>;
  using Left = FragmentLoader<T, Tile::kRows, Tile::kDepth, Problem::kLeftAlongRows>;
  using Right = FragmentLoader<T, Tile::kColumns, Tile::kDepth, Problem::kRightAlongRows>;
  T* const stages = reinterpret_cast<T*>(shared);
  const int steps = problem.steps();
  const auto load = [&](int step) {
    if (step < steps) {
      T* const stage = stages + step % Tile::kStages * Tile::kStageElements;
      Left::Stage::template load<Tile::kThreads>(stage, problem.left(step), problem.vectors());
      Right::Stage::template load<Tile::kThreads>(stage + Tile::kRows * Tile::kDepth, problem.right(step),
                                                  problem.vectors());
    }
    cp_async_commit();  // also of nothing, so that the groups can be counted
  };
#pragma unroll
  for (int step = 0; step < Tile::kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();  // shows the stage to all, and that all are done with the one before it
    load(step + Tile::kStages - 1);
    const T* stage = stages + step % Tile::kStages * Tile::kStageElements;
    multiply_stage<T, Problem, Tile>(sums, stage, stage + Tile::kRows * Tile::kDepth);
  }
}

// Calls visit(row in the tile, column in the tile, two neighbouring sums), or for a problem of pairs
// visit(row, column of both, sums of the first, sums of the second).
template <bool kPaired, class Visit, int r, int c, int rw, int cw, int l>
__device__ __forceinline__ void for_each_run(TensorCoreTile<r, c, rw, cw, l>,
                                             const typename TensorCoreTile<r, c, rw, cw, l>::Sums& sums, Visit visit) {
  using Tile = TensorCoreTile<r, c, rw, cw, l>;
  const int row = warp_row<Tile>() + warp_lane() / 4, column = 2 * (warp_lane() % 4);
#pragma unroll
  for (int i = 0; i < Tile::kRowFragments; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < Tile::kColumnFragments; j += kPaired ? 2 : 1) {
        const auto& sum = sums[i][j];
        const float run[2] = {sum[2 * half], sum[2 * half + 1]};
        if constexpr (kPaired) {
          const auto& other = sums[i][j + 1];
          const float second[2] = {other[2 * half], other[2 * half + 1]};
          visit(row + 16 * i + 8 * half, warp_column<Tile>() / 2 + 4 * j + column, run, second);
        } else {
          visit(row + 16 * i + 8 * half, warp_column<Tile>() + 8 * j + column, run);
        }
      }
}

}  // namespace rudnn
