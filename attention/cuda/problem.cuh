// The operands of attention and of its gradients, the tiles of their rows and keys, and what becomes of their scores.
#pragma once

#include "common/cuda/operand.cuh"
#include "ops/attention_math.h"

namespace rudnn {

// Keys, and rows of queries, are worked on in tiles of so many, where they are streamed; the depth of products in
// chunks.
constexpr int kStreamed = 64, kChunk = 64;

// [B, H, S, D] whose last axis is contiguous; strides in elements.
struct HeadRows {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// An operand of the scores [B, Hq, Sq, Sk]; the strides of axes along which it is repeated are 0.
struct ScoreOperand {
  Factors elements;  // of null if there is none
  int64_t batch_stride;
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;

  __device__ __forceinline__ bool exists() const { return elements.data != nullptr; }
  __device__ __forceinline__ int64_t row(int64_t batch, int64_t head, int64_t query) const {
    return batch * batch_stride + head * head_stride + query * query_stride;
  }
};

struct AttentionArgs {
  int64_t batch;
  int64_t heads;  // of queries
  int64_t key_heads;
  int64_t head_dim;
  int64_t value_dim;
  KeyWindow window;  // and the numbers of queries and keys
  HeadRows query;
  HeadRows key;
  HeadRows value;
  ScoreOperand mask;  // of bytes
  ScoreOperand bias;
  Factors sinks;  // [Hq], or null
  float scale;
  float softcap;
  bool vectors;  // whether all rows of all operands start at a multiple of 16 bytes and are multiples of them

  void* output;  // [B, Hq, Sq, Dv]
  float* lse;    // [B, Hq, Sq]
  // Results of splits of keys, if there are several: [splits, B, Hq, Sq].
  int64_t splits;
  int64_t split_keys;    // of each
  float* split_output;   // and Dv: the sum of the weighted values
  float* split_maximum;  // of the scores
  float* split_sum;      // of the weights

  // Of the backward.
  HeadRows grad;
  HeadRows forward_output;
  const float* known_lse;  // [B, Hq, Sq]
  float* delta;            // [B, Hq, Sq], the sum of grad * output
  void* grad_query;
  void* grad_key;
  void* grad_value;
  void* grad_bias;
  void* grad_sinks;
  int64_t bias_shape[4];

  // Heads of queries to a key head.
  __host__ __device__ int64_t group() const { return heads / key_heads; }
  __device__ __forceinline__ int64_t rows() const { return batch * heads * window.queries; }
};

// The rows of queries that share a key head, in tiles of kRows: of one head, or where a head has fewer rows, of all
// heads one after the other.
template <int kRows>
struct RowTiling {
  int64_t span_heads;
  int64_t span_tiles;
  int64_t tiles;

  __host__ __device__ RowTiling(int64_t group, int64_t queries)
      : span_heads(queries < kRows ? group : 1),
        span_tiles((span_heads * queries + kRows - 1) / kRows),
        tiles(group / span_heads * span_tiles) {}
};

// The rows of a tile, and those after it, up to the last one of its heads.
struct RowTile {
  int64_t batch;
  int64_t head;
  int64_t heads;
  int64_t first;    // row, counted from the start of the first head
  int64_t queries;  // of a head

  __device__ __forceinline__ int64_t rows() const { return heads * queries; }
};

template <int kRows>
__device__ __forceinline__ RowTile row_tile(const AttentionArgs& args, int64_t batch, int64_t key_head, int64_t index) {
  const RowTiling<kRows> tiling(args.group(), args.window.queries);
  return {batch, key_head * args.group() + index / tiling.span_tiles * tiling.span_heads, tiling.span_heads,
          index % tiling.span_tiles * kRows, args.window.queries};
}

// A row of queries; one that does not exist has no keys.
struct QueryRow {
  bool exists;
  int64_t head;
  int64_t query;
  int64_t index;  // among all rows
};

__device__ __forceinline__ QueryRow query_row(const AttentionArgs& args, const RowTile& tile, int row) {
  const int64_t in_span = tile.first + row;
  QueryRow found{in_span < tile.rows(), tile.head, in_span, 0};
  if (tile.heads > 1) {
    found.head += in_span / tile.queries;
    found.query = in_span % tile.queries;
  }
  found.index = (tile.batch * args.heads + found.head) * tile.queries + found.query;
  return found;
}

// The keys that the rows of a tile have between them, and those that each of them has.
struct TileKeys {
  KeyRange some;
  KeyRange all;
  bool full;  // whether the tile has all its rows

  template <int kRows>
  static __device__ __forceinline__ TileKeys of(const AttentionArgs& args, const RowTile& tile) {
    // Of several heads a tile has all queries, or nearly. Later queries have later keys.
    const int64_t last_row = tile.first + kRows - 1;
    const bool one_head = tile.heads == 1;
    const int64_t last_query = one_head && last_row < tile.queries ? last_row : tile.queries - 1;
    const KeyRange earliest = args.window.keys_of(one_head ? tile.first : 0), latest = args.window.keys_of(last_query);
    return {{min(earliest.first, latest.first), latest.last}, {latest.first, earliest.last}, last_row < tile.rows()};
  }
  __device__ __forceinline__ bool some_have(int64_t begin, int count) const {
    return some.first < begin + count && begin < some.last;
  }
  __device__ __forceinline__ bool all_have(int64_t begin, int count) const {
    return all.first <= begin && begin + count <= all.last;
  }
};

// Where a row's keys of a tile that begins at `key` lie in it, and what mask and bias hold for that one.
struct ScoreRow {
  int first;
  int last;
  int64_t mask;
  int64_t bias;

  __device__ __forceinline__ ScoreRow(const AttentionArgs& args, int64_t batch, const QueryRow& row, int64_t key)
      : first(0), last(0), mask(0), bias(0) {
    if (!row.exists) return;
    const KeyRange keys = args.window.keys_of(row.query);
    first = static_cast<int>(min(max(keys.first - key, int64_t{0}), int64_t{kStreamed}));
    last = static_cast<int>(min(max(keys.last - key, int64_t{0}), int64_t{kStreamed}));
    mask = args.mask.row(batch, row.head, row.query) + key * args.mask.key_stride;
    bias = args.bias.row(batch, row.head, row.query) + key * args.bias.key_stride;
  }

  // Adds the bias to kCount scores of the row, at(n) for key_of(n) of the tile; -inf for those of excluded keys. A bias
  // is float32 or of the type T.
  template <class T, int kCount, class At, class KeyOf>
  __device__ __forceinline__ void complete(const AttentionArgs& args, At at, KeyOf key_of) const {
    const auto add = [&](auto addend_of) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (at(n) == -INFINITY) continue;
        const float addend = addend_of(key_of(n));
        at(n) = addend == -INFINITY ? addend : at(n) + addend;
      }
    };
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (key_of(n) < first || key_of(n) >= last) at(n) = -INFINITY;
    if (args.mask.exists()) {
      const auto* elements = static_cast<const uint8_t*>(args.mask.elements.data) + mask;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        if (at(n) != -INFINITY && elements[key_of(n) * args.mask.key_stride] == 0) at(n) = -INFINITY;
    }
    if (!args.bias.exists()) return;
    if (args.bias.elements.dtype == DType::kFloat32) {
      const auto* elements = static_cast<const float*>(args.bias.elements.data) + bias;
      add([&](int key) { return elements[key * args.bias.key_stride]; });
    } else if constexpr (sizeof(T) == 2) {
      const auto* elements = static_cast<const T*>(args.bias.elements.data) + bias;
      add([&](int key) { return to_float(elements[key * args.bias.key_stride]); });
    }
  }
};

// Whether the mask leaves any row of a tile a key of a tile. Every lane of a warp calls, and learns the same.
template <int kRows>
__device__ __forceinline__ bool mask_leaves_some(const AttentionArgs& args, const RowTile& tile, int64_t key) {
  if (!args.mask.exists()) return true;
  constexpr int kAtOnce = 4, kLaneKeys = kStreamed / kWarpSize;
  const auto* mask = static_cast<const uint8_t*>(args.mask.elements.data);
  const int count = static_cast<int>(min(args.window.keys - key, int64_t{kStreamed}));
  const int rows = static_cast<int>(min(tile.rows() - tile.first, int64_t{kRows}));
  for (int first = 0; first < rows; first += kAtOnce) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const QueryRow row = query_row(args, tile, first + i);
      if (!row.exists) continue;
      const int64_t offset = args.mask.row(tile.batch, row.head, row.query) + key * args.mask.key_stride;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        const int column = warp_lane() + j * kWarpSize;
        if (column < count) found |= mask[offset + column * args.mask.key_stride] != 0;
      }
    }
    if (__any_sync(kFullMask, found)) return true;
  }
  return false;
}

// Rows of the heads of a tile, for loads of them.
template <class T>
struct HeadsMatrix {
  const T* data;
  int64_t head_stride;
  int64_t row_stride;
  int64_t queries;
  int64_t rows;
  int64_t columns;

  __device__ __forceinline__ const T* row(int64_t r) const {
    if (r >= rows) return nullptr;
    return rows == queries ? data + r * row_stride : data + r / queries * head_stride + r % queries * row_stride;
  }
};

template <class T>
__device__ __forceinline__ const T* head_data(const HeadRows& source, int64_t batch, int64_t head) {
  return static_cast<const T*>(source.data) + batch * source.batch_stride + head * source.head_stride;
}
template <class T>
__device__ __forceinline__ HeadsMatrix<T> rows_of(const HeadRows& source, const RowTile& tile, int64_t columns) {
  return {head_data<T>(source, tile.batch, tile.head),
          source.head_stride,
          source.row_stride,
          tile.queries,
          tile.rows(),
          columns};
}
template <class T>
__device__ __forceinline__ Matrix<T> keys_of(const HeadRows& source, int64_t batch, int64_t key_head, int64_t keys,
                                             int64_t columns) {
  return {head_data<T>(source, batch, key_head), source.row_stride, keys, columns};
}

}  // namespace rudnn
