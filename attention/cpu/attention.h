// Tiles of attention and of its gradients. Free of Torch, so that ISA-specific code can include it.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// [B, H, S, D] whose last axis is contiguous; strides in elements.
struct HeadRows {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// An operand of the scores [B, Hq, Sq, Sk]; the strides of axes along which it is repeated are 0.
struct ScoreOperand {
  const void* data = nullptr;  // null if there is none
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
};

struct AttentionProblem {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t heads = 0;  // of queries
  int64_t key_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  HeadRows query;
  HeadRows key;
  HeadRows value;
  ScoreOperand mask;  // of bytes
  ScoreOperand bias;
  DType bias_dtype = DType::kFloat32;
  const float* sinks = nullptr;  // [Hq], optional
  float scale = 1;
  float softcap = 0;  // 0 for none
  // The keys of a query are at most so far from its position, which is that of the query + Sk - Sq.
  int64_t keys_before = 0;
  int64_t keys_after = 0;
};

// Queries are worked on in tiles of rows: some queries of one head or, where there are few, all queries of several
// heads that share their keys.
inline constexpr int64_t kRowTile = 64;
inline constexpr int64_t kKeyTile = 64;
// The largest tiles of any strategy.
inline constexpr int64_t kMaxRowTile = 128;
inline constexpr int64_t kMaxKeyTile = 256;
// With a single tile of rows to a key head, keys are split, so that threads have work.
inline constexpr int64_t kSplitKeys = 1024;
inline constexpr int64_t kMaxSplits = 32;

// Of the accelerated strategy: rows of a tile, and of one that is used where all rows of a key head fit; keys of a
// chunk and of a tile; what D and Dv are rounded up to.
inline constexpr int64_t kAcceleratedRows = 32;
inline constexpr int64_t kFewRows = 16;
inline constexpr int64_t kKeyChunk = 32;
inline constexpr int64_t kPackedDim = 32;
// Rows and keys of the tiles of its backward.
inline constexpr int64_t kGradRows = 128;
inline constexpr int64_t kGradKeys = 128;

struct AttentionArgs {
  AttentionProblem problem;
  void* output = nullptr;  // [B, Hq, Sq, Dv]
  float* lse = nullptr;    // [B, Hq, Sq]
  // Results of splits, if there are several: [splits, B, Hq, Sq].
  int64_t splits = 1;
  int64_t split_keys = 0;          // of each
  float* split_output = nullptr;   // and Dv: the sum of the weighted values
  float* split_maximum = nullptr;  // of the scores
  float* split_sum = nullptr;      // of the weights
  // Accelerated: copies of the keys and values of each key head, by chunks of kKeyChunk keys.
  int64_t packed_key_chunks = 0;     // of a key head: all, or the last alone, which may lack keys
  void* packed_keys = nullptr;       // [B, Hkv, packed_key_chunks, kKeyChunk, D], 0 where there is nothing to copy
  void* packed_values = nullptr;     // [B, Hkv, chunks, Dv, kKeyChunk], 0 where a value is not finite
  uint8_t* values_finite = nullptr;  // [B, Hkv, chunks]
};

struct AttentionBackwardArgs {
  AttentionProblem problem;
  HeadRows grad;
  HeadRows output;
  const float* lse = nullptr;  // [B, Hq, Sq]
  float* delta = nullptr;      // [B, Hq, Sq], scratch: the sum of grad * output
  void* grad_query = nullptr;  // contiguous, each optional
  void* grad_key = nullptr;
  void* grad_value = nullptr;
  void* grad_bias = nullptr;
  void* grad_sinks = nullptr;
  // The axes of the bias, 1 or those of the scores.
  int64_t bias_shape[4] = {};
  DType sinks_dtype = DType::kFloat32;
  // The key head of the phases that share one out.
  int64_t shared_head = 0;  // batch * Hkv + head
  float* shared_rows = nullptr;
};

// The tiles of rows of a key head.
struct RowTiles {
  int64_t heads_per_tile;  // more than 1 only where all queries of a head fit
  int64_t tiles_per_head;
  int64_t count;
};

[[gnu::always_inline]] inline RowTiles row_tiles_of(const AttentionProblem& problem, int64_t tile_rows) {
  const int64_t group = problem.heads / problem.key_heads;
  RowTiles tiles = {1, (problem.queries + tile_rows - 1) / tile_rows, 0};
  if (problem.queries > 0 && problem.queries < tile_rows) {
    const int64_t fitting = tile_rows / problem.queries;
    tiles.heads_per_tile = fitting < group ? fitting : group;
  }
  tiles.count = (group + tiles.heads_per_tile - 1) / tiles.heads_per_tile * tiles.tiles_per_head;
  return tiles;
}

// Floats of scratch that units [begin, end) of a phase need, whatever range it is, or floats of shared_rows.
using AttentionScratch = int64_t(const AttentionProblem& problem);
// The work of units [begin, end). Units may run at the same time, each thread with its own scratch, which may hold what
// earlier units left.
using AttentionPhase = void(const AttentionArgs& args, float* scratch, int64_t begin, int64_t end);
using AttentionBackwardPhase = void(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end);

namespace generic {
AttentionScratch attention_scratch;
AttentionPhase attention_tiles;  // units: splits of tiles of rows
AttentionPhase attention_merge;  // units: rows
AttentionScratch attention_grad_scratch;
AttentionBackwardPhase attention_delta;  // units: rows
AttentionScratch attention_grad_rows_size;
AttentionBackwardPhase attention_grad_heads;    // units: key heads
AttentionBackwardPhase attention_grad_rows;     // units: tiles of rows of a key head, which are kept in shared_rows
AttentionBackwardPhase attention_grad_keys;     // units: tiles of keys of a key head
AttentionBackwardPhase attention_grad_queries;  // units: tiles of rows of a key head
AttentionScratch attention_grad_bias_scratch;
AttentionBackwardPhase attention_grad_bias;   // units: tiles of the bias
AttentionBackwardPhase attention_grad_sinks;  // units: heads
}  // namespace generic

namespace avx2 {
AttentionScratch attention_scratch;
AttentionPhase attention_tiles;  // units: splits of tiles of rows
AttentionPhase attention_merge;  // units: rows
AttentionScratch attention_grad_scratch;
AttentionBackwardPhase attention_delta;  // units: rows
AttentionScratch attention_grad_rows_size;
AttentionBackwardPhase attention_grad_heads;    // units: key heads
AttentionBackwardPhase attention_grad_rows;     // units: tiles of rows of a key head, which are kept in shared_rows
AttentionBackwardPhase attention_grad_keys;     // units: tiles of keys of a key head
AttentionBackwardPhase attention_grad_queries;  // units: tiles of rows of a key head
AttentionScratch attention_grad_bias_scratch;
AttentionBackwardPhase attention_grad_bias;   // units: tiles of the bias
AttentionBackwardPhase attention_grad_sinks;  // units: heads
}  // namespace avx2

namespace avx512 {
AttentionScratch attention_scratch;
AttentionPhase attention_tiles;  // units: splits of tiles of rows
AttentionPhase attention_merge;  // units: rows
AttentionScratch attention_grad_scratch;
AttentionBackwardPhase attention_delta;  // units: rows
AttentionScratch attention_grad_rows_size;
AttentionBackwardPhase attention_grad_heads;    // units: key heads
AttentionBackwardPhase attention_grad_rows;     // units: tiles of rows of a key head, which are kept in shared_rows
AttentionBackwardPhase attention_grad_keys;     // units: tiles of keys of a key head
AttentionBackwardPhase attention_grad_queries;  // units: tiles of rows of a key head
AttentionScratch attention_grad_bias_scratch;
AttentionBackwardPhase attention_grad_bias;   // units: tiles of the bias
AttentionBackwardPhase attention_grad_sinks;  // units: heads
}  // namespace avx512

namespace avx512_bf16 {
AttentionScratch attention_scratch;
AttentionPhase attention_pack;   // units: chunks of keys
AttentionPhase attention_tiles;  // units: splits of tiles of rows
AttentionScratch attention_few_scratch;
AttentionPhase attention_few;  // units: splits of key heads
AttentionScratch attention_grad_scratch;
AttentionScratch attention_grad_rows_size;
AttentionBackwardPhase attention_grad_heads;    // units: key heads
AttentionBackwardPhase attention_grad_rows;     // units: tiles of rows of a key head, which are kept in shared_rows
AttentionBackwardPhase attention_grad_keys;     // units: tiles of keys of a key head
AttentionBackwardPhase attention_grad_queries;  // units: tiles of rows of a key head
}  // namespace avx512_bf16

namespace amx {
AttentionScratch attention_scratch;
AttentionPhase attention_pack;   // units: chunks of keys
AttentionPhase attention_tiles;  // units: splits of tiles of rows
AttentionScratch attention_few_scratch;
AttentionPhase attention_few;  // units: splits of key heads
AttentionScratch attention_grad_scratch;
AttentionScratch attention_grad_rows_size;
AttentionBackwardPhase attention_grad_heads;    // units: key heads
AttentionBackwardPhase attention_grad_rows;     // units: tiles of rows of a key head, which are kept in shared_rows
AttentionBackwardPhase attention_grad_keys;     // units: tiles of keys of a key head
AttentionBackwardPhase attention_grad_queries;  // units: tiles of rows of a key head
}  // namespace amx

}  // namespace rudnn
