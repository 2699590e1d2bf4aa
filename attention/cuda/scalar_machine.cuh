// Tiles of scores and of results on the float32 units, for every dtype.
#pragma once

#include "common/cuda/scalar_stage.cuh"
#include "cuda/problem.cuh"

namespace rudnn {

// 256 threads have 64 stationary rows and kColumns columns of the result: 4 x 4 scores and 4 x (kColumns / 16) results
// each. Terms are summed kTerms at a time and the sums added, since the error of a sum grows with the number of its
// terms. A role says which rows the products are of (walk.cuh).
template <class T, int columns>
class ScalarMachine {
  static constexpr int kRun = 4;

 public:
  using Element = T;
  static constexpr int kRows = 64, kColumns = columns, kThreads = 256, kLeastBlocks = 1, kTerms = 16;
  // Of a tile of scores: rows and columns of a thread, and the neighbouring threads that have the same rows.
  static constexpr int kThreadRows = kRun, kThreadColumns = kRun, kRowLanes = kStreamed / kRun;

  struct Scores {
    float values[kRun][kRun] = {};
    __device__ __forceinline__ float& at(int i, int j) { return values[i][j]; }
  };
  struct Result {
    float values[kRun][kColumns / kStreamed * kRun] = {};
  };

  __host__ static size_t shared_bytes(int64_t, int64_t) { return (2 * kStage + kStreamed * kRows) * sizeof(float); }
  static __device__ __forceinline__ int row(int i) { return threadIdx.x / kRowLanes * kRun + i; }
  static __device__ __forceinline__ int column(int j) { return threadIdx.x % kRowLanes * kRun + j; }

  template <class Role>
  __device__ __forceinline__ ScalarMachine(const Role&, unsigned char* shared)
      : stages_(reinterpret_cast<float*>(shared)), weights_(stages_ + 2 * kStage) {}

  // The scores of the stationary rows with those of a tile: the role's product of this number.
  template <int kProduct, class Role>
  __device__ __forceinline__ void multiply(const Role& role, int64_t tile, Scores& scores) {
    const auto stationary = role.template stationary<kProduct>();
    const auto streamed = role.template streamed<kProduct>(tile);
    ScalarStage<T, kRows, kThreads> left;
    Streamed right;
    const auto load = [&](int64_t depth) {
      left.template load<true>(slice(stationary.operand, stationary.row, depth), role.vectors());
      right.template load<true>(slice(streamed.operand, streamed.row, depth), role.vectors());
    };
    load(0);
    for (int64_t depth = 0; depth < stationary.operand.columns; depth += kDepth) {
      float* const left_stage = next_stage();
      float* const right_stage = left_stage + kDepth * kRows;
      left.template store<true>(left_stage);
      right.template store<true>(right_stage);
      __syncthreads();
      if (depth + kDepth < stationary.operand.columns) load(depth + kDepth);
      float sums[kRun][kRun] = {};
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        float a[kRun], b[kRun];
        load_floats(a, left_stage + Streamed::position(k, row(0)));
        load_floats(b, right_stage + Streamed::position(k, column(0)));
#pragma unroll
        for (int i = 0; i < kRun; ++i)
#pragma unroll
          for (int j = 0; j < kRun; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int j = 0; j < kRun; ++j) scores.values[i][j] += sums[i][j];
    }
  }

  // result += weights * the summed rows of a tile. If some weights are those of excluded keys, what these multiply may
  // be NaN and does not count.
  template <class Role>
  __device__ __forceinline__ void add_weighted(const Role& role, int64_t tile, const Scores& weights, bool excluding,
                                               Result& result) {
    if (excluding)
      add_weighted<true>(role, tile, weights, result);
    else
      add_weighted<false>(role, tile, weights, result);
  }

  template <class Scale>
  static __device__ __forceinline__ void scale(Result& result, Scale factor_of) {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      for (float& value : result.values[i]) value *= factor_of(i);
  }

  // Calls visit(i, column in the result's slice, neighbouring results).
  template <class Visit>
  static __device__ __forceinline__ void for_each_run(const Result& result, Visit visit) {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
#pragma unroll
      for (int part = 0; part < kColumns / kStreamed; ++part) {
        float run[kRun];
#pragma unroll
        for (int j = 0; j < kRun; ++j) run[j] = result.values[i][part * kRun + j];
        visit(i, part * kStreamed + column(0), run);
      }
  }

 private:
  using Streamed = ScalarStage<T, kStreamed, kThreads>;
  using Summed = ScalarStage<T, kColumns, kThreads>;
  static constexpr int kDepth = Streamed::kDepth;
  static_assert(kDepth == kTerms);
  static constexpr int kStage = kDepth * (kRows + kColumns);
  static_assert(kRows == kStreamed && kColumns % kStreamed == 0);

  // Rows are permuted by key, so that the stores of threads with neighbouring keys meet no bank twice.
  static __device__ __forceinline__ int weight_position(int key, int row) {
    return key * kRows + (row ^ (key / kRun % 8 * kRun));
  }

  // One stage is written while the other one may still be read.
  __device__ __forceinline__ float* next_stage() {
    stage_ ^= 1;
    return stages_ + stage_ * kStage;
  }

  template <bool kExcluding, class Role>
  __device__ __forceinline__ void add_weighted(const Role& role, int64_t tile, const Scores& weights, Result& result) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      Vec<float, kRun> rows;
#pragma unroll
      for (int i = 0; i < kRun; ++i) rows[i] = weights.values[i][j];
      store_vec(weights_ + weight_position(column(j), row(0)), rows);
    }
    const auto summed = role.summed(tile);
    Summed right;
    const auto load = [&](int first) {
      right.template load<false>(slice(summed.operand, summed.row + first, summed.column), role.vectors());
    };
    load(0);
    for (int first = 0; first < kStreamed; first += kDepth) {
      float* const stage = next_stage();
      right.template store<false>(stage);
      __syncthreads();
      if (first + kDepth < kStreamed) load(first + kDepth);
      Result sums;
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        float a[kRun];
        load_floats(a, weights_ + weight_position(first + k, row(0)));
#pragma unroll
        for (int part = 0; part < kColumns / kStreamed; ++part) {
          float b[kRun];
          load_floats(b, stage + Summed::position(k, part * kStreamed + column(0)));
#pragma unroll
          for (int i = 0; i < kRun; ++i)
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
              float& sum = sums.values[i][part * kRun + j];
              if (!kExcluding || a[i] != 0.0f) sum = fmaf(a[i], b[j], sum);
            }
        }
      }
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int j = 0; j < kColumns / kStreamed * kRun; ++j) result.values[i][j] += sums.values[i][j];
    }
  }

  float* stages_;
  float* weights_;  // [kStreamed, kRows]
  int stage_ = 0;
};

}  // namespace rudnn
