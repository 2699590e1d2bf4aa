// Sizes of the tiles of common/metal/tile.h, for launchers and shaders.
#pragma once

namespace rudnn {

enum TileSize : int {
  // Of the product that a threadgroup computes.
  kTileRows = 32,
  kTileColumns = 64,
  kTileThreads = 128,
  // Of each row and column that it has at a time.
  kTileBytes = 64,
};

}  // namespace rudnn
