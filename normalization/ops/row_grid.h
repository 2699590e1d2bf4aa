// How far launchers of CUDA and of Metal share out rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rudnn {

// More blocks than any device runs at once gain nothing: the rest of the rows is strided over.
inline int64_t blocks_for(int64_t rows, int64_t rows_per_block) {
  constexpr int64_t kMostBlocks = 4096;
  return std::min((rows + rows_per_block - 1) / rows_per_block, kMostBlocks);
}

// Rows to plan for where sums over the rows are wanted. Each that is worked on at once leaves a partial row of float32
// for every parameter, so it stands for at least 16; a thousand of them keep a device busy.
inline int64_t rows_to_sum(int64_t rows) {
  constexpr int64_t kLeastRows = 16, kMostAtOnce = 1024;
  return std::clamp((rows + kLeastRows - 1) / kLeastRows, int64_t{1}, kMostAtOnce);
}

}  // namespace rudnn
