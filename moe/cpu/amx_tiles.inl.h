// Products of bfloat16 matrices by AMX tiles. Include first in a file, before the code that uses it; between
// configure_tiles() and release_tiles() a thread may multiply. Right tiles come in twos, for 32 columns, one after the
// other.
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

// Adds the product of two rows of left tiles and `steps` right tiles, or twos of them where kTwo. While the tiles are
// busy, between() runs once in each step. prefetch_distance is from a left tile to what will be needed soon, in
// elements; 0 for nothing.
template <bool kTwo, class Between>
inline void add_product(const LeftTiles& left0, const LeftTiles& left1, const bfloat16* right, int64_t right_step,
                        int64_t steps, int64_t prefetch_distance, Between&& between) {
  alignas(64) bfloat16 copies[2][kTileSize];
  // The compiler does not know what memory the tiles are loaded from.
  __asm__ volatile("" : : "r"(copies) : "memory");
  for (int64_t step = 0; step < steps; ++step) {
    const LeftTile a0 = left_tile(left0, step, copies[0]);
    const LeftTile a1 = left_tile(left1, step, copies[1]);
    __asm__ volatile("" : : : "memory");
    const bfloat16* b = right + step * right_step;
    _tile_loadd(5, b, 64);
    _tile_loadd(4, a0.data, a0.row_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTwo) {
      _tile_loadd(5, b + kTileSize, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    _tile_loadd(4, a1.data, a1.row_bytes);
    if constexpr (kTwo) {
      _tile_dpbf16ps(3, 4, 5);
      _tile_loadd(5, b, 64);
    }
    _tile_dpbf16ps(2, 4, 5);
    if (prefetch_distance != 0) {
      const auto* soon0 = reinterpret_cast<const char*>(left0.data + step * left0.step_stride + prefetch_distance);
      const auto* soon1 = reinterpret_cast<const char*>(left1.data + step * left1.step_stride + prefetch_distance);
#pragma GCC unroll 16
      for (int row = 0; row < 16; ++row) {
        __builtin_prefetch(soon0 + row * 2 * left0.row_stride, 0, 2);
        __builtin_prefetch(soon1 + row * 2 * left1.row_stride, 0, 2);
      }
    }
    between();
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
