// Which rows of which expert a block works on, and the matrices that it reads tiles of.
#pragma once

#include "common/cuda/operand.cuh"
#include "cuda/arguments.cuh"

namespace rudnn {

// Rows of the dispatched matrix that belong to one expert, or to nobody: those before the first expert's, which count
// as expert -1's, and those after the last one's, which count as the next one's.
struct RowGroup {
  int expert;
  int64_t begin;
  int64_t end;

  __device__ __forceinline__ int64_t rows() const { return end - begin; }
};

// Where the groups of the rows [0, rows) begin and end. Offsets are not trusted: a boundary is the largest of the
// offsets up to it, clamped to [0, rows], so that groups never overlap. Every lane of a warp calls its functions.
struct RowGroups {
  const int32_t* expert_offsets;  // [experts + 1]
  int experts;
  int64_t rows;

  __device__ __forceinline__ bool has_expert(const RowGroup& group) const {
    return group.expert >= 0 && group.expert < experts;
  }

  __device__ __forceinline__ RowGroup of_expert(int expert) const {
    return last_group([&](int each, int64_t) { return each <= expert; });
  }

  // Tiles of kTileRows rows are numbered, an expert's from ceil(begin / kTileRows) + expert on: enough of them for
  // every group, and which ones follows from where it begins alone. Some numbers have no rows.
  template <int kTileRows>
  __device__ __forceinline__ RowGroup tile(int64_t number) const {
    const auto first_tile = [](int expert, int64_t begin) {
      return max((begin + kTileRows - 1) / kTileRows + expert, int64_t{0});
    };
    RowGroup group = last_group([&](int each, int64_t begin) { return first_tile(each, begin) <= number; });
    group.begin = min(group.begin + (number - first_tile(group.expert, group.begin)) * kTileRows, group.end);
    group.end = min(group.begin + kTileRows, group.end);
    return group;
  }

 private:
  // The last group of which is_reached(expert, begin) holds: it holds of the first group, and up to the one returned.
  template <class IsReached>
  __device__ __forceinline__ RowGroup last_group(IsReached is_reached) const {
    RowGroup found{-1, 0, 0};
    int32_t largest = 0;  // of the offsets before those that the lanes look at
    for (int first = 0;; first += kWarpSize) {
      const int expert = first + warp_lane();
      int32_t offset = expert <= experts ? expert_offsets[expert] : 0;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2)
        offset = max(offset, __shfl_up_sync(kFullMask, offset, distance));  // the first lanes get their own
      offset = max(offset, largest);
      const int64_t begin = expert <= experts ? min(int64_t{offset}, rows) : rows;
      const int reached = __popc(__ballot_sync(kFullMask, expert <= experts && is_reached(expert, begin)));
      if (reached > 0) {
        found.expert = first + reached - 1;
        found.begin = __shfl_sync(kFullMask, begin, reached - 1);
      }
      if (reached < kWarpSize) {
        found.end = __shfl_sync(kFullMask, begin, reached);
        return found;
      }
      largest = __shfl_sync(kFullMask, offset, kWarpSize - 1);
    }
  }
};
template <int kTileRows>
__host__ __device__ inline int64_t row_tiles(int64_t rows, int64_t experts) {
  return (rows + kTileRows - 1) / kTileRows + experts + 1;
}

// The position of a block in a grid of row_tiles * column_tiles. Neighbouring blocks share a few row tiles and sweep
// over the columns, so that both operands stay in the cache.
struct TilePosition {
  int64_t row_tile;
  int64_t column_tile;

  __device__ __forceinline__ TilePosition(int64_t row_tiles, int64_t column_tiles) {
    constexpr int64_t kBand = 8;
    const int64_t band = int64_t{blockIdx.x} / (kBand * column_tiles) * kBand;
    const int64_t in_band = int64_t{blockIdx.x} % (kBand * column_tiles);
    const int64_t height = min(kBand, row_tiles - band);
    row_tile = band + in_band % height;
    column_tile = in_band / height;
  }
};

// The rows of two matrices in turn, kRun of the first, then kRun of the second.
template <class T, int kRun>
struct PairedMatrix {
  const T* first;
  const T* second;
  int64_t pitch;
  int64_t rows;  // of each
  int64_t columns;

  __device__ __forceinline__ const T* row(int64_t r) const {
    const int64_t of_each = r / (2 * kRun) * kRun + r % kRun;
    return of_each < rows ? (r / kRun % 2 == 0 ? first : second) + of_each * pitch : nullptr;
  }
};

}  // namespace rudnn
