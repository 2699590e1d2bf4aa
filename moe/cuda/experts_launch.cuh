// What the launchers of the experts and of their gradients have in common.
#pragma once

#include "cuda/experts.cuh"
#include "cuda/launch.cuh"
#include "ops/experts.h"

namespace rudnn {

using WideTile = TensorCoreTile<128, 128, 2, 4, 2>;
using NarrowTile = TensorCoreTile<32, 128, 1, 4, 4>;

// Calls visit(TypeTag<T>, Tile): narrow tiles where experts have few rows on average, since they waste less. What a row
// becomes depends on neither.
template <class Visit>
void visit_tile(bool tensor_core, DType dtype, int64_t rows_per_expert, Visit&& visit) {
  visit_dtype(dtype, [&](auto type) {
    if constexpr (sizeof(typename decltype(type)::type) == 2) {
      if (tensor_core && rows_per_expert > NarrowTile::kRows) return visit(type, WideTile{});
      if (tensor_core) return visit(type, NarrowTile{});
    }
    visit(type, ScalarTile{});
  });
}

inline ExpertMatrices matrices_data(const char* name, const Tensor* weight) {
  return {cuda::input_data(name, weight), weight->stride(0)};
}

// What forward and backward have in common. `activated` is theirs alone.
inline ExpertsArgs common_args(const Tensor& expert_offsets, const ExpertWeights& weights, const Tensor& activated) {
  ExpertsArgs args{};
  args.groups.expert_offsets = static_cast<const int32_t*>(cuda::input_data("expert_offsets", &expert_offsets));
  args.groups.experts = static_cast<int>(weights.down->size(0));
  args.groups.rows = activated.size(0);
  args.hidden = weights.down->size(1);
  args.intermediate = weights.down->size(2);
  args.gate = matrices_data("gate", weights.gate);
  args.up = matrices_data("up", weights.up);
  args.down = matrices_data("down", weights.down);
  args.activated = cuda::scratch_data("activated", &activated);
  const int64_t element_bytes = activated.element_size();
  args.vectors = is_whole_vectors(args.hidden, element_bytes) && is_whole_vectors(args.intermediate, element_bytes) &&
                 is_whole_vectors(args.gate.stride, element_bytes) && is_whole_vectors(args.up.stride, element_bytes) &&
                 is_whole_vectors(args.down.stride, element_bytes);
  return args;
}

template <class Tile>
LaunchConfig tile_grid(int64_t blocks, Stream stream) {
  return {blocks_of(blocks), dim3(Tile::kThreads), Tile::kSharedBytes, stream};
}

// Launches a problem whose rows are the dispatched ones; a tile has `tile_columns` of the result's.
template <class T, class Tile, template <class, class> class Problem>
void launch_rows(const ExpertsArgs& args, int64_t columns, int64_t tile_columns, Stream stream) {
  const int64_t blocks = row_tiles<Tile::kRows>(args.groups.rows, args.groups.experts);
  launch(grouped_product<T, Tile, Problem>, tile_grid<Tile>(blocks * ceil_divide(columns, tile_columns), stream), args);
}

}  // namespace rudnn
