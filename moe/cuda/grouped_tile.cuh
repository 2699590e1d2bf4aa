// Which rows of which expert a block works on, and the matrices that it reads tiles of.
#pragma once

#include "cuda/arguments.cuh"

namespace rudnn {

// Rows of the dispatched matrix that belong to one expert, or to nobody: expert is -1 then.
struct RowGroup {
  int expert;
  int64_t begin;
  int64_t end;

  __device__ __forceinline__ int64_t rows() const { return max(end - begin, int64_t{0}); }
};

// The rows [0, rows) fall into experts + 2 groups: what lies before the first expert, the experts', and what is left.
// Offsets are not trusted: every boundary is clamped to [0, rows].
struct RowGroups {
  const int32_t* expert_offsets;  // [experts + 1]
  int experts;
  int64_t rows;

  __device__ __forceinline__ int64_t boundary(int group) const {
    if (group <= 0) return 0;
    if (group > experts + 1) return rows;
    return min(max(int64_t{expert_offsets[group - 1]}, int64_t{0}), rows);
  }
  __device__ __forceinline__ RowGroup group(int index) const {
    return {index > 0 && index <= experts ? index - 1 : -1, boundary(index), boundary(index + 1)};
  }
  __device__ __forceinline__ RowGroup expert(int index) const { return group(index + 1); }

  // Tiles of kTileRows rows are numbered so that a group's first is boundary / kTileRows + group: enough of them for
  // every group, and the number follows from the boundary alone. Some numbers have no rows.
  template <int kTileRows>
  __device__ __forceinline__ int64_t first_tile(int group) const {
    return boundary(group) / kTileRows + group;
  }

  // The rows of a tile; every lane of the warp calls. The lanes look at 32 groups at once.
  template <int kTileRows>
  __device__ __forceinline__ RowGroup tile(int64_t number) const {
    int low = 0, high = experts + 2;  // first_tile(low) <= number < first_tile(high)
    while (high - low > 1) {
      const int step = (high - low + kWarpSize - 1) / kWarpSize;
      const int probe = low + warp_lane() * step;
      const bool reached = probe < high && first_tile<kTileRows>(probe) <= number;
      low += (kWarpSize - 1 - __clz(static_cast<int>(__ballot_sync(kFullMask, reached)))) * step;
      high = min(low + step, high);
    }
    RowGroup rows = group(low);
    rows.begin += (number - first_tile<kTileRows>(low)) * kTileRows;
    rows.end = min(rows.end, rows.begin + kTileRows);
    return rows;
  }
};
template <int kTileRows>
__host__ __device__ inline int64_t row_tiles(int64_t rows, int64_t experts) {
  return rows / kTileRows + experts + 2;
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

// A row-major matrix; outside of it all elements count as 0.
template <class T>
struct Matrix {
  const T* data;
  int64_t pitch;
  int64_t rows;
  int64_t columns;

  __device__ __forceinline__ const T* row(int64_t r) const { return r < rows ? data + r * pitch : nullptr; }
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

// The part of an operand that a step of a product reads, from this row and column on.
template <class Operand>
struct Slice {
  Operand operand;
  int64_t row;
  int64_t column;
};
template <class Operand>
__device__ __forceinline__ Slice<Operand> slice(Operand operand, int64_t row, int64_t column) {
  return {operand, row, column};
}

// kVector elements of a row that may end among them, or be missing.
template <int kVector, class T>
__device__ __forceinline__ Vec<T, kVector> load_ragged(const T* row, int64_t column, int64_t columns) {
  Vec<T, kVector> out{};
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (row != nullptr && column + i < columns) out[i] = row[column + i];
  return out;
}

}  // namespace rudnn
