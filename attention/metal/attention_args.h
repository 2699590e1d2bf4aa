// What launchers and shaders of attention agree on.
#pragma once

#include "common/fixed_width.h"
#include "common/metal/tile_sizes.h"

namespace rudnn {

enum AttentionSize : int {
  // With a single tile of rows to a key head, keys are split, so that there are threadgroups enough: so many keys or
  // more to a split, whole tiles.
  kSplitKeys = 1024,
  kMaxSplits = 32,
  // Threads of the threadgroup that merges splits, one to a column of a row.
  kMergeColumns = 32,
  kMergeRows = 8,
  // Threads of the threadgroup that has the gradient of a sink.
  kSinkThreads = 256,
  kSimdgroupLanes = 32,
};

// [B, H, S, D] whose last axis is contiguous; strides in elements.
struct HeadStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// An operand of the scores [B, Hq, Sq, Sk]; the strides of axes along which it is repeated are 0.
struct ScoreStrides {
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

struct AttentionArgs {
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int64_t head_dim;
  int64_t value_dim;
  int64_t keys_before;  // of KeyWindow
  int64_t keys_after;
  HeadStrides query;
  HeadStrides key;
  HeadStrides value;
  HeadStrides grad;    // backward
  HeadStrides output;  // backward; the forward's is contiguous
  ScoreStrides mask;
  ScoreStrides bias;
  int32_t heads;  // of queries
  int32_t key_heads;
  float scale;
  float softcap;       // 0 for none
  int64_t split_keys;  // of each split, forward
  int32_t splits;
};

// Of the bias's gradient: the axes of the bias, 1 or those of the scores.
struct BiasArgs {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
};

// The tiles of so many rows that a key head has. They are of one head each if all its queries fill one, else of the
// rows of all heads, one after the other.
inline int64_t row_tiles_of(int64_t queries, int64_t heads, int64_t tile_rows) {
  const int64_t rows = queries < tile_rows ? queries * heads : queries;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  return queries < tile_rows ? tiles : tiles * heads;
}

// Indices of [[buffer]] and [[function_constant]].
enum AttentionBuffer : int {
  kArgsBuffer,
  kQueryBuffer,
  kKeyBuffer,
  kValueBuffer,
  kMaskBuffer,
  kBiasBuffer,
  kSinksBuffer,
  kOutputBuffer,
  kLseBuffer,
  kSplitSumsBuffer,     // float [splits, B, Hq, Sq, Dv]: the sums of weighted values
  kSplitMaximaBuffer,   // float [splits, B, Hq, Sq]: of the scores
  kSplitWeightsBuffer,  // float [splits, B, Hq, Sq]: the sums of weights
  kGradBuffer,
  kDeltaBuffer,  // float [B, Hq, Sq]: the sums of grad * output
  kGradientBuffer,
  kBiasArgsBuffer
};
enum AttentionConstant : int {
  kAlignedKeysConstant,    // all rows of queries and keys are multiples of 16 bytes and start at one
  kAlignedValuesConstant,  // likewise those of values and what has their size
  kHasMaskConstant,
  kHasBiasConstant,
  kBiasTypeConstant,
  kHasSinksConstant,
  kSinksTypeConstant,
  kHasSplitsConstant
};

}  // namespace rudnn
