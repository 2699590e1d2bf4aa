// What launchers and shaders of dispatch agree on.
#pragma once

#include "common/fixed_width.h"

namespace rudnn {

// Slots are sorted by bucket: those of expert e are in bucket e, those whose index is no expert in the last one.
struct DispatchArgs {
  int64_t slots;    // and rows
  int64_t choices;  // experts of a token
  int64_t width;    // elements of a row, which are contiguous, as are the rows
  int64_t block;    // slots of a threadgroup
  int32_t blocks;
  int32_t experts;
};

// Indices of [[buffer]] and [[function_constant]].
enum DispatchBuffer : int {
  kArgsBuffer,
  kIndicesBuffer,
  kCountsBuffer,  // [experts + 1, blocks]: slots of a bucket in a block, then the bucket's first row there
  kExpertOffsetsBuffer,
  kRowExpertsBuffer,
  kRowTokensBuffer,
  kRowSlotsBuffer,
  kSlotRowsBuffer,
  kInputBuffer,
  kValuesBuffer
};
enum DispatchConstant : int { kLongIndicesConstant };

enum DispatchLimit : int {
  kSortThreads = 256,       // of a threadgroup that counts or places slots
  kMostScanThreads = 1024,  // of the threadgroup that sums the counts
  kMostScanSimdgroups = kMostScanThreads / 32,
};

}  // namespace rudnn
