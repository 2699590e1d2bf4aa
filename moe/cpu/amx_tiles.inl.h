// Products of bfloat16 matrices by AMX tiles. Include first in a file, before the code that uses it; between
// configure_tiles() and release_tiles() a thread may multiply.
#include "common/cpu/amx.h"
#include "cpu/experts.h"
#include "cpu/experts_units.inl.h"

namespace rudnn::amx {
namespace {

// Up to 16 rows of a matrix, cut into left tiles. What lies outside of it counts as 0.
struct LeftTiles {
  const bfloat16* data;
  int64_t row_stride;
  int64_t step_stride;  // from tile to tile
  int64_t rows;
  int64_t columns;
  bool streamed = false;  // whether they need not stay in the caches
};

// One right tile after the other, or twos of them, the second of which lies kTileSize elements behind the first.
struct RightTiles {
  const bfloat16* data;
  int64_t step_stride;
  int64_t tile_columns = 16;
  bool streamed = false;
};

// Rows [first, last) of two left tiles that another product will need soon.
struct ComingRows {
  const bfloat16* data0 = nullptr;
  const bfloat16* data1 = nullptr;
  int64_t row_stride = 0;
  int64_t first = 0;
  int64_t last = 0;
  int64_t first_step = 0;  // of the running product, which fetches the first one of the coming product

  void fetch(int64_t step) const {
    if (step < first_step) return;
    const int64_t column = (step - first_step) * kDepth;
    for (int64_t row = first; row < last; ++row) {
      __builtin_prefetch(data0 + row * row_stride + column, 0, 2);
      __builtin_prefetch(data1 + row * row_stride + column, 0, 2);
    }
  }
};

struct LeftTile {
  const bfloat16* data;
  int64_t row_bytes;
};

// A copy of a tile that reaches beyond its matrix.
[[gnu::noinline]] LeftTile padded_tile(const LeftTiles& tiles, int64_t step, bfloat16* copy) {
  for (int64_t row = 0; row < 16; ++row) {
    const __m512i elements = row < tiles.rows
                                 ? load_row(tiles.data + row * tiles.row_stride, step * kDepth, tiles.columns)
                                 : _mm512_setzero_si512();
    _mm512_store_si512(copy + row * kDepth, elements);
  }
  return {copy, 64};
}

inline LeftTile left_tile(const LeftTiles& tiles, int64_t step, bfloat16* copy) {
  if (tiles.rows < 16 || (step + 1) * kDepth > tiles.columns) return padded_tile(tiles, step, copy);
  return {tiles.data + step * tiles.step_stride, 2 * tiles.row_stride};
}

// The tiles of sums and of right operands, which may have fewer columns.
inline constexpr unsigned kNarrowTiles = 0b101111;

// Sums of 32 rows by 32 columns: tile 2 * i + j has rows 16 i.. and columns 16 j..
struct Sums {
  alignas(64) float tiles[4][16][16];
};

inline void clear_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// To tile 4.
inline void load_left(const LeftTile& tile, bool streamed) {
  if (streamed) {
    _tile_stream_loadd(4, tile.data, tile.row_bytes);
  } else {
    _tile_loadd(4, tile.data, tile.row_bytes);
  }
}

// To tile 5.
inline void load_right(const bfloat16* tile, const RightTiles& right) {
  if (right.streamed) {
    _tile_stream_loadd(5, tile, 4 * right.tile_columns);
  } else {
    _tile_loadd(5, tile, 4 * right.tile_columns);
  }
}

// Adds the product of two rows of left tiles and `steps` right tiles, or twos of them where kTwo. In each step
// between() runs once and rows of coming tiles are fetched, both after loads of tiles, for which products wait.
template <bool kTwo, class Between>
inline void add_product(const LeftTiles& left0, const LeftTiles& left1, const RightTiles& right, int64_t steps,
                        const ComingRows& coming, Between&& between) {
  alignas(64) bfloat16 copies[2][kTileSize];
  // The compiler does not know what memory the tiles are loaded from.
  __asm__ volatile("" : : "r"(copies) : "memory");
  for (int64_t step = 0; step < steps; ++step) {
    const LeftTile a0 = left_tile(left0, step, copies[0]);
    const LeftTile a1 = left_tile(left1, step, copies[1]);
    __asm__ volatile("" : : : "memory");
    const bfloat16* b = right.data + step * right.step_stride;
    load_right(b, right);
    load_left(a0, left0.streamed);
    between();
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTwo) {
      load_right(b + kTileSize, right);
      _tile_dpbf16ps(1, 4, 5);
    }
    load_left(a1, left1.streamed);
    coming.fetch(step);
    if constexpr (kTwo) {
      _tile_dpbf16ps(3, 4, 5);
      load_right(b, right);
    }
    _tile_dpbf16ps(2, 4, 5);
  }
}

inline void store_sums(bool two, Sums& sums) {
  _tile_stored(0, sums.tiles[0], 64);
  _tile_stored(2, sums.tiles[2], 64);
  if (!two) return;
  _tile_stored(1, sums.tiles[1], 64);
  _tile_stored(3, sums.tiles[3], 64);
}

// Experts and blocks of rows, which are packed one after the other.

inline int64_t block_count(const ExpertGroup& group) { return ceil_div(group.end - group.begin, kRowBlock); }

inline bfloat16* block_of(void* packed, int64_t block, int64_t features) {
  return static_cast<bfloat16*>(packed) + block * packed_size(features);
}

inline const bfloat16* matrix_of(const ExpertMatrices<const void>& matrices, const ExpertGroup& group) {
  return static_cast<const bfloat16*>(matrices.data) + group.expert * matrices.stride;
}

}  // namespace
}  // namespace rudnn::amx
