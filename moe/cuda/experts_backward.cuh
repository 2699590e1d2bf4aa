// The gradients of experts: first those of both projections, then those of the values and of the weights.
#pragma once

#include "cuda/experts.cuh"

namespace rudnn {

// For each expert result = left^T right over its rows.
struct WeightGradientArgs {
  RowGroups groups;
  int64_t rows;     // of a result
  int64_t columns;  // of a result
  bool vectors;
  const void* left;   // [groups.rows, rows]
  const void* right;  // [groups.rows, columns]
  void* result;       // [experts, rows, columns], of T if rounded, else float32
  int64_t stride;     // elements from one result to the next
  bool rounded;
};

template <int kRun, class T>
__device__ __forceinline__ void load_run(float (&run)[kRun], const T* row, int64_t column, int64_t columns,
                                         bool vectors) {
  if (vectors && column < columns) {
    load_floats(run, row + column);
  } else {
    const auto ragged = load_ragged<kRun>(row, column, columns);
#pragma unroll
    for (int i = 0; i < kRun; ++i) run[i] = to_float(ragged[i]);
  }
}

// The gradient of `activated`, grad down, becomes those of both projections. `activated` is made again on the way.
template <class T, class Tile>
class ActivateBackward : public RowProblem<Tile> {
 public:
  static constexpr bool kLeftAlongRows = true, kRightAlongRows = false, kPaired = false;

  __device__ __forceinline__ explicit ActivateBackward(const ExpertsArgs& args)
      : RowProblem<Tile>(args, args.intermediate, Tile::kColumns, args.hidden) {}

  __device__ __forceinline__ int steps() const { return steps_; }
  __device__ __forceinline__ auto left(int step) const {
    return slice(rows_of<T>(args_.grad, group_, args_.hidden), 0, this->depth(step));
  }
  __device__ __forceinline__ auto right(int step) const {
    return slice(matrix_of<T>(args_.down, group_.expert, args_.hidden, args_.intermediate), this->depth(step), column_);
  }

  template <int kRun>
  __device__ __forceinline__ void finish(int row, int tile_column, const float (&grad)[kRun]) const {
    if (row >= group_.rows()) return;
    const int64_t width = args_.intermediate, column = column_ + tile_column;
    float gate[kRun], up[kRun], activated[kRun];
    load_run(gate, this->template result_row<T>(args_.gate_projection, row, width), column, width, args_.vectors);
    load_run(up, this->template result_row<T>(args_.up_projection, row, width), column, width, args_.vectors);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const SwiGlu swiglu = swiglu_with_slopes(gate[i], up[i]);
      activated[i] = swiglu.value;
      gate[i] = grad[i] * swiglu.gate_slope;
      up[i] = grad[i] * swiglu.up_slope;
    }
    store_run(this->template result_row<T>(args_.activated, row, width), column, width, activated, args_.vectors);
    store_run(this->template result_row<T>(args_.grad_gate_projection, row, width), column, width, gate, args_.vectors);
    store_run(this->template result_row<T>(args_.grad_up_projection, row, width), column, width, up, args_.vectors);
  }

 private:
  using RowProblem<Tile>::args_, RowProblem<Tile>::group_, RowProblem<Tile>::column_, RowProblem<Tile>::steps_;
};

// grad_values = grad_gate_projection gate + grad_up_projection up, as one sum: first over gate, then over up.
template <class T, class Tile>
class ValueGradient : public RowProblem<Tile> {
 public:
  static constexpr bool kLeftAlongRows = true, kRightAlongRows = false, kPaired = false;

  __device__ __forceinline__ explicit ValueGradient(const ExpertsArgs& args)
      : RowProblem<Tile>(args, args.hidden, Tile::kColumns, args.intermediate) {}

  __device__ __forceinline__ int steps() const { return 2 * steps_; }
  __device__ __forceinline__ auto left(int step) const {
    const void* grad = step < steps_ ? args_.grad_gate_projection : args_.grad_up_projection;
    return slice(rows_of<T>(grad, group_, args_.intermediate), 0, this->depth(step - (step < steps_ ? 0 : steps_)));
  }
  __device__ __forceinline__ auto right(int step) const {
    const ExpertMatrices weight = step < steps_ ? args_.gate : args_.up;
    return slice(matrix_of<T>(weight, group_.expert, args_.intermediate, args_.hidden),
                 this->depth(step - (step < steps_ ? 0 : steps_)), column_);
  }

  template <int kRun>
  __device__ __forceinline__ void finish(int row, int tile_column, const float (&sums)[kRun]) const {
    if (row >= group_.rows()) return;
    store_run(this->template result_row<T>(args_.grad_values, row, args_.hidden), column_ + tile_column, args_.hidden,
              sums, args_.vectors);
  }

 private:
  using RowProblem<Tile>::args_, RowProblem<Tile>::group_, RowProblem<Tile>::column_, RowProblem<Tile>::steps_;
};

// The gradient of an expert's matrix; 0 without rows.
template <class T, class Tile>
class WeightGradient {
 public:
  using Args = WeightGradientArgs;
  static constexpr bool kLeftAlongRows = false, kRightAlongRows = false, kPaired = false;

  __device__ __forceinline__ explicit WeightGradient(const WeightGradientArgs& args) : args_(args) {
    const int64_t row_tiles = (args.rows + Tile::kRows - 1) / Tile::kRows;
    const int64_t tiles = row_tiles * ((args.columns + Tile::kColumns - 1) / Tile::kColumns);
    const int64_t expert = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    group_ = args.groups.of_expert(static_cast<int>(expert));
    row_ = tile % row_tiles * Tile::kRows;
    column_ = tile / row_tiles * Tile::kColumns;
    offset_ = expert * args.stride;
  }

  __device__ __forceinline__ bool vectors() const { return args_.vectors; }
  __device__ __forceinline__ int steps() const {
    return static_cast<int>((group_.rows() + Tile::kDepth - 1) / Tile::kDepth);
  }
  __device__ __forceinline__ auto left(int step) const {
    return slice(rows_of<T>(args_.left, group_, args_.rows), int64_t{step} * Tile::kDepth, row_);
  }
  __device__ __forceinline__ auto right(int step) const {
    return slice(rows_of<T>(args_.right, group_, args_.columns), int64_t{step} * Tile::kDepth, column_);
  }

  template <int kRun>
  __device__ __forceinline__ void finish(int tile_row, int tile_column, const float (&sums)[kRun]) const {
    const int64_t row = row_ + tile_row;
    if (row >= args_.rows) return;
    const int64_t offset = offset_ + row * args_.columns, column = column_ + tile_column;
    if (args_.rounded)
      store_run(static_cast<T*>(args_.result) + offset, column, args_.columns, sums, args_.vectors);
    else
      store_run(static_cast<float*>(args_.result) + offset, column, args_.columns, sums, args_.vectors);
  }

 private:
  const WeightGradientArgs& args_;
  RowGroup group_;
  int64_t offset_, row_, column_;
};

}  // namespace rudnn
