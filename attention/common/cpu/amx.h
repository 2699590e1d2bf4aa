// Tiles of AMX for bfloat16. Include first, before the code that uses it; between configure_tiles() and release_tiles()
// a thread may multiply.
//
// A processor has more tiles than names for them, so that a load need not wait until the products of what was there
// before are done. While the other thread of a core is busy there are about ten: products that use few of the eight
// names then run up to twice as fast, even if they load some tiles twice.
//
// A left tile holds 16 rows of 32 elements, as they lie in memory. A right tile holds 32 rows of 16 columns as 16 pairs
// of rows: [pair][column][2]. Where there are fewer columns, narrower tiles take fewer lines of the cache.
#pragma once

#include "common/cpu/vec_avx512_bf16.h"

#pragma GCC target("amx-tile,amx-bf16")
#undef RUDNN_ISA
#define RUDNN_ISA amx

namespace rudnn::amx {

using namespace avx512_bf16;

inline constexpr int64_t kTileSize = 512;  // elements
inline constexpr int64_t kDepth = 32;      // terms of a sum that a tile holds

// Sixteen rows and 64 bytes to each of the eight tiles, but `columns` columns of 4 bytes to those whose bit is set in
// `narrow`.
inline void configure_tiles(unsigned narrow = 0, int64_t columns = 16) {
  struct alignas(64) Configuration {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Configuration configuration = {};
  configuration.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    configuration.row_bytes[tile] = static_cast<uint16_t>((narrow >> tile & 1) != 0 ? 4 * columns : 64);
    configuration.rows[tile] = 16;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(configuration));
}

inline void release_tiles() { _tile_release(); }

}  // namespace rudnn::amx
