// Sizes of the tiles of common/metal/tile.h, for launchers and shaders.
#pragma once

namespace rudnn {

enum TileSize : int {
  kTileRows = 32,      // of the product that a threadgroup computes
  kTileColumns = 64,   //
  kTileThreads = 128,  // of the threadgroup
  kTileBytes = 64,     // of each row and column that it has at a time
};

}  // namespace rudnn
