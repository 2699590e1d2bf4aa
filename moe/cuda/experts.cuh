// experts: down(silu(gate x) * (up x)) for the rows of each expert, as products over ragged groups of rows. A problem
// says what a block's tile of a product reads and what becomes of the sums; a tile says how the block computes it.
#pragma once

#include "cuda/scalar_product.cuh"
#include "cuda/tensor_core_product.cuh"
#include "ops/activation_math.h"

namespace rudnn {

// Matrices of all experts, each contiguous, `stride` elements apart.
struct ExpertMatrices {
  const void* data;
  int64_t stride;
};

struct ExpertsArgs {
  RowGroups groups;
  int64_t hidden;
  int64_t intermediate;
  bool vectors;         // whether all rows of all matrices start at a multiple of 16 bytes
  ExpertMatrices gate;  // [experts, intermediate, hidden]
  ExpertMatrices up;    // [experts, intermediate, hidden]
  ExpertMatrices down;  // [experts, hidden, intermediate]
  const void* values;   // [rows, hidden]
  void* activated;      // [rows, intermediate], silu(gate x) * (up x)
  void* output;         // [rows, hidden]
  // Of [rows, intermediate]. The forward writes them if they are there.
  void* gate_projection;
  void* up_projection;

  const void* grad;  // [rows, hidden]
  void* grad_gate_projection;
  void* grad_up_projection;
  void* grad_values;  // [rows, hidden]
};

template <class T>
__device__ __forceinline__ Matrix<T> matrix_of(ExpertMatrices matrices, int expert, int64_t rows, int64_t columns) {
  return {static_cast<const T*>(matrices.data) + expert * matrices.stride, columns, rows, columns};
}
// The rows of a group; those past its end do not exist.
template <class T>
__device__ __forceinline__ Matrix<T> rows_of(const void* data, const RowGroup& group, int64_t columns) {
  return {static_cast<const T*>(data) + group.begin * columns, columns, group.rows(), columns};
}

// A tile of a product whose rows are the dispatched ones.
template <class Tile>
class RowProblem {
 public:
  using Args = ExpertsArgs;

  __device__ __forceinline__ bool vectors() const { return args_.vectors; }

 protected:
  // `columns` of the result, of which a tile has `tile_columns`; `summed` elements of the other axis, read by each tile
  // for as many steps as they need.
  __device__ __forceinline__ RowProblem(const ExpertsArgs& args, int64_t columns, int64_t tile_columns, int64_t summed)
      : args_(args) {
    const TilePosition position(row_tiles<Tile::kRows>(args.groups.rows, args.groups.experts),
                                (columns + tile_columns - 1) / tile_columns);
    group_ = args.groups.template tile<Tile::kRows>(position.row_tile);
    column_ = position.column_tile * tile_columns;
    steps_ = args.groups.has_expert(group_) && group_.rows() > 0
                 ? static_cast<int>((summed + Tile::kDepth - 1) / Tile::kDepth)
                 : 0;
  }
  static __device__ __forceinline__ int64_t depth(int step) { return int64_t{step} * Tile::kDepth; }
  template <class T>
  __device__ __forceinline__ T* result_row(void* data, int row, int64_t columns) const {
    return static_cast<T*>(data) + (group_.begin + row) * columns;
  }

  const ExpertsArgs& args_;
  RowGroup group_;
  int64_t column_;
  int steps_;  // 0 for rows that are nobody's, whose results are 0, and for a tile without rows
};

// activated = silu(x gate^T) * (x up^T).
template <class T, class Tile>
class Activate : public RowProblem<Tile> {
 public:
  static constexpr bool kLeftAlongRows = true, kRightAlongRows = true, kPaired = true;

  __device__ __forceinline__ explicit Activate(const ExpertsArgs& args)
      : RowProblem<Tile>(args, args.intermediate, Tile::kColumns / 2, args.hidden) {}

  __device__ __forceinline__ int steps() const { return steps_; }
  __device__ __forceinline__ auto left(int step) const {
    return slice(rows_of<T>(args_.values, group_, args_.hidden), 0, this->depth(step));
  }
  __device__ __forceinline__ auto right(int step) const {
    const auto gate = matrix_of<T>(args_.gate, group_.expert, args_.intermediate, args_.hidden);
    const auto up = matrix_of<T>(args_.up, group_.expert, args_.intermediate, args_.hidden);
    const PairedMatrix<T, Tile::kPairRun> both{gate.data, up.data, gate.pitch, gate.rows, gate.columns};
    return slice(both, 2 * column_, this->depth(step));
  }

  template <int kRun>
  __device__ __forceinline__ void finish(int row, int tile_column, const float (&gate)[kRun],
                                         const float (&up)[kRun]) const {
    if (row >= group_.rows()) return;
    const int64_t width = args_.intermediate, column = column_ + tile_column;
    float activated[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) activated[i] = swiglu(gate[i], up[i]);
    store_run(this->template result_row<T>(args_.activated, row, width), column, width, activated, args_.vectors);
    if (args_.gate_projection == nullptr) return;
    store_run(this->template result_row<T>(args_.gate_projection, row, width), column, width, gate, args_.vectors);
    store_run(this->template result_row<T>(args_.up_projection, row, width), column, width, up, args_.vectors);
  }

 private:
  using RowProblem<Tile>::args_, RowProblem<Tile>::group_, RowProblem<Tile>::column_, RowProblem<Tile>::steps_;
};

// output = activated down^T.
template <class T, class Tile>
class ProjectDown : public RowProblem<Tile> {
 public:
  static constexpr bool kLeftAlongRows = true, kRightAlongRows = true, kPaired = false;

  __device__ __forceinline__ explicit ProjectDown(const ExpertsArgs& args)
      : RowProblem<Tile>(args, args.hidden, Tile::kColumns, args.intermediate) {}

  __device__ __forceinline__ int steps() const { return steps_; }
  __device__ __forceinline__ auto left(int step) const {
    return slice(rows_of<T>(args_.activated, group_, args_.intermediate), 0, this->depth(step));
  }
  __device__ __forceinline__ auto right(int step) const {
    return slice(matrix_of<T>(args_.down, group_.expert, args_.hidden, args_.intermediate), column_, this->depth(step));
  }

  template <int kRun>
  __device__ __forceinline__ void finish(int row, int tile_column, const float (&sums)[kRun]) const {
    if (row >= group_.rows()) return;
    store_run(this->template result_row<T>(args_.output, row, args_.hidden), column_ + tile_column, args_.hidden, sums,
              args_.vectors);
  }

 private:
  using RowProblem<Tile>::args_, RowProblem<Tile>::group_, RowProblem<Tile>::column_, RowProblem<Tile>::steps_;
};

template <class T, class Tile, template <class, class> class Problem>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kLeastBlocks)
    grouped_product(typename Problem<T, Tile>::Args args) {
  DYNAMIC_SHARED(shared);
  const Problem<T, Tile> problem(args);
  typename Tile::Sums sums = {};
  multiply<T>(problem, Tile{}, sums, shared);
  for_each_run<Problem<T, Tile>::kPaired>(
      Tile{}, sums, [&](int row, int column, const auto&... runs) { problem.finish(row, column, runs...); });
}

}  // namespace rudnn
