// Tiles of scores. A threadgroup keeps kTileRows rows, queries or keys, and takes the others kTileColumns at a time;
// what it makes of their scores are weights, by which the columns' rows are added to its result. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/metal/elements.h"
#include "common/metal/tile.h"
#include "metal/attention_args.h"
#include "ops/attention_math.h"

namespace rudnn {

// Weights are kept in float32 for SIMD, in the matrix units' element type for these.
template <typename T, bool kMatrixUnits>
struct UnitOf {
  using Product = ScalarProduct<T>;
  using Weight = float;
};
template <typename T>
struct UnitOf<T, true> {
  using Product = MatrixProduct<T, 1>;
  using Weight = T;
};

template <typename T, bool kMatrixUnits>
struct Unit {
  using Element = T;
  using Product = typename UnitOf<T, kMatrixUnits>::Product;
  using Weight = typename UnitOf<T, kMatrixUnits>::Weight;
  using Kept = Tile<T, kTileRows, true>;
  using Taken = Tile<T, kTileColumns, true>;
  using Added = Tile<T, kTileColumns, false>;
  struct Weights {
    static constant constexpr bool kAlong = true;
    static constant constexpr int kStride = kTileColumns + 16 / int(sizeof(Weight));
    static constant constexpr int kSize = kTileRows * kStride;
    static int offset_of(int row, int column) { return row * kStride + column; }
  };
  static constant constexpr int kRowElements = Product::kElements / Product::kThreadRows;
  static constant constexpr int kRightSize = Taken::kSize > Added::kSize ? Taken::kSize : Added::kSize;
};

// Rows of queries that share a key head: the first one's head and query, and after the last query of a head the first
// one of the next.
struct RowTile {
  int head;
  long query;
  int count;
};

inline RowTile row_tile_of(constant AttentionArgs& args, int key_head, long index, int tile_rows) {
  const int group = args.heads / args.key_heads;
  const int first_head = key_head * group;
  if (args.queries < tile_rows) {
    const long row = index * tile_rows;
    return {first_head + int(row / args.queries), row % args.queries,
            int(min(long(tile_rows), group * args.queries - row))};
  }
  const long tiles = row_tiles_of(args.queries, 1, tile_rows);
  const long query = index % tiles * tile_rows;
  return {first_head + int(index / tiles), query, int(min(long(tile_rows), args.queries - query))};
}

// The tile that a threadgroup keeps. With causality later queries have more keys, so their tiles come first.
inline RowTile kept_tile_of(constant AttentionArgs& args, int key_head, long index) {
  const long tiles = row_tiles_of(args.queries, args.heads / args.key_heads, kTileRows);
  return row_tile_of(args, key_head, tiles - 1 - index, kTileRows);
}

struct RowPlace {
  int head;
  long query;
};

inline RowPlace place_of(RowTile tile, int row, long queries) {
  const long query = tile.query + row;
  if (query < queries) return {tile.head, query};
  return {tile.head + int(query / queries), query % queries};
}

// Lines (of Tile::load) that are rows of a head and, beyond its last one, those of the next heads.
template <typename T>
struct HeadRows {
  device const T* elements;
  long head_stride;
  long row_stride;
  long rows;  // of a head
  long lines;
  long length;

  device const T* at(long line, long position) const {
    const long offset = line < rows ? line * row_stride : line / rows * head_stride + line % rows * row_stride;
    return elements + offset + position;
  }
};

template <typename T>
inline HeadRows<T> rows_of_queries(device const T* elements, constant HeadStrides& strides, long batch, RowTile tile,
                                   long queries, long length) {
  return {elements + batch * strides.batch + tile.head * strides.head,
          strides.head,
          strides.row,
          queries,
          tile.query + tile.count,
          length};
}

template <typename T>
inline HeadRows<T> rows_of_keys(device const T* elements, constant HeadStrides& strides, long batch, int head,
                                long keys, long length) {
  return {elements + batch * strides.batch + head * strides.head, 0, strides.row, keys, keys, length};
}

inline KeyWindow key_window(constant AttentionArgs& args) {
  return {args.queries, args.keys, args.keys_before, args.keys_after};
}

// The keys that causality and the window leave to the rows of a tile. Later queries have later keys, so the first and
// the last one tell what all have.
struct TileKeys {
  KeyRange earliest;
  KeyRange latest;

  bool all_have(long begin, long end) const { return latest.first <= begin && end <= earliest.last; }
  bool some_have(long begin, long end) const { return earliest.first < end && begin < latest.last; }
};

inline TileKeys tile_keys(constant AttentionArgs& args, RowTile tile) {
  const KeyWindow window = key_window(args);
  const long last = tile.query + tile.count - 1;
  const bool one_head = last < args.queries;
  return {window.keys_of(one_head ? tile.query : 0), window.keys_of(one_head ? last : args.queries - 1)};
}

// What the scores of a row of queries depend on.
struct QueryRow {
  long first_key;  // those that causality and the window leave; none of a row that does not exist
  long last_key;
  long mask;  // where key 0 is in the mask and in the bias
  long bias;
  float lse;  // in the backward
  float delta;
};

inline QueryRow query_row_of(constant AttentionArgs& args, long batch, RowTile tile, int row) {
  if (row >= tile.count) return {0, 0, 0, 0, 0.0f, 0.0f};
  const RowPlace place = place_of(tile, row, args.queries);
  const KeyRange keys = key_window(args).keys_of(place.query);
  return {keys.first,
          keys.last,
          batch * args.mask.batch + place.head * args.mask.head + place.query * args.mask.query,
          batch * args.bias.batch + place.head * args.bias.head + place.query * args.bias.query,
          0.0f,
          0.0f};
}

inline long row_index(constant AttentionArgs& args, long batch, RowPlace place) {
  return (batch * args.heads + place.head) * args.queries + place.query;
}

struct ScoreOperands {
  device const uchar* mask;
  device const void* bias;
  bool has_mask;
  bool has_bias;
  int bias_type;

  float addend(constant AttentionArgs& args, QueryRow row, long key) const {
    return has_bias ? element_at(bias, bias_type, row.bias + key * args.bias.key) : 0.0f;
  }
  bool excludes(constant AttentionArgs& args, QueryRow row, long key) const {
    if (key < row.first_key || key >= row.last_key) return true;
    if (has_mask && mask[row.mask + key * args.mask.key] == 0) return true;
    return has_bias && addend(args, row, key) == -INFINITY;
  }
};

// The bits that any thread of the threadgroup has. All threads call this together; `votes` has room for each simdgroup.
inline uint bits_of_any(uint bits, threadgroup uint* votes, uint index) {
  bits = simd_or(bits);
  if (index % kSimdgroupLanes == 0) votes[index / kSimdgroupLanes] = bits;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint all = 0;
  for (int simdgroup = 0; simdgroup < kTileThreads / kSimdgroupLanes; ++simdgroup) all |= votes[simdgroup];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next call writes the votes again
  return all;
}

// The elements of a thread, a bit for each, of queries and keys that take part, and whether the whole tile has any, and
// any that do not.
struct Visible {
  uint elements;
  bool some;
  bool all;

  bool has(int element) const { return (elements >> element & 1) != 0; }
};

// Of `count` rows and the keys [key, end). `all_in_window` is whether all rows have all of these.
template <typename Pairs>
inline Visible visible_elements(constant AttentionArgs& args, ScoreOperands operands, threadgroup const QueryRow* rows,
                                int count, long key, long end, bool all_in_window, threadgroup uint* votes,
                                uint index) {
  constexpr uint kSome = 1;
  constexpr uint kNotAll = 2;
  uint elements = 0;
  uint vote = 0;
  for (int element = 0; element < Pairs::kElements; ++element) {
    const int row = Pairs::query_of(element, index);
    const long element_key = key + Pairs::key_of(element, index);
    if (row >= count || element_key >= end) continue;
    const bool is_visible = !operands.excludes(args, rows[row], element_key);
    if (is_visible) elements |= uint(1) << element;
    vote |= is_visible ? kSome : kNotAll;
  }
  if (!operands.has_mask && !operands.has_bias) return {elements, true, all_in_window};
  vote = bits_of_any(vote, votes, index);
  return {elements, (vote & kSome) != 0, (vote & kNotAll) == 0};
}

// Which query and key an element of a product has: rows of queries and columns of keys, or the other way round.
template <typename Product, bool kKeysAreRows>
struct PairsOf {
  static constant constexpr int kElements = Product::kElements;
  static int query_of(int element, uint index) {
    return kKeysAreRows ? Product::column_of(element, index) : Product::row_of(element, index);
  }
  static int key_of(int element, uint index) {
    return kKeysAreRows ? Product::row_of(element, index) : Product::column_of(element, index);
  }
};

// product = rows from `kept_line` on times those from `taken_line` on. All threads of the threadgroup call this.
template <typename U>
inline void multiply_rows(threadgroup typename U::Element* left, threadgroup typename U::Element* right,
                          HeadRows<typename U::Element> kept, long kept_line, HeadRows<typename U::Element> taken,
                          long taken_line, bool aligned, uint index, thread typename U::Product& product) {
  using T = typename U::Element;
  product.clear();
  add_product(Operand<T, typename U::Kept, HeadRows<T>>{left, kept, kept_line},
              Operand<T, typename U::Taken, HeadRows<T>>{right, taken, taken_line}, 0, kept.length, aligned, index,
              product);
}

// Adds what inf and NaN of a tile of added rows make of weights that are not 0, and leaves 0 in their place.
template <typename U>
inline void take_out_not_finite(threadgroup const typename U::Weight* weights, threadgroup typename U::Element* added,
                                threadgroup uint* votes, uint index, thread typename U::Product& result) {
  using T = typename U::Element;
  using Product = typename U::Product;
  using Added = typename U::Added;
  uint found = 0;
  for (int i = index; i < Added::kSize; i += kTileThreads) {
    if (i % Added::kStride < Added::kLength && !is_finite(float(added[i]))) found = 1;
  }
  if (bits_of_any(found, votes, index) == 0) return;
  for (int element = 0; element < Product::kElements; ++element) {
    const int row = Product::row_of(element, index);
    const int column = Product::column_of(element, index);
    for (int depth = 0; depth < Added::kDepth; ++depth) {
      const float x = float(added[Added::offset_of(column, depth)]);
      const float weight = float(weights[U::Weights::offset_of(row, depth)]);
      if (!is_finite(x) && weight != 0.0f) result.set(element, result.value(element) + weight * x);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = index; i < Added::kSize; i += kTileThreads) {
    if (i % Added::kStride < Added::kLength && !is_finite(float(added[i]))) added[i] = T(0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// result += weights * columns [column, column + kTileColumns) of `count` added rows from `line` on. All threads of the
// threadgroup call this, after they have written the weights. Unless `all_visible`, rows may hold anything where their
// weight is 0.
template <typename U>
inline void add_weighted_rows(threadgroup const typename U::Weight* weights, threadgroup typename U::Element* right,
                              HeadRows<typename U::Element> added, long line, int count, long column, bool aligned,
                              bool all_visible, threadgroup uint* votes, uint index,
                              thread typename U::Product& result) {
  using Added = typename U::Added;
  for (int depth = 0; depth < count; depth += Added::kDepth) {
    threadgroup const typename U::Weight* part = weights + U::Weights::offset_of(0, depth);
    Added::load(right, added, column, line + depth, aligned, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!all_visible) take_out_not_finite<U>(part, right, votes, index, result);
    result.template add<typename U::Weights, Added>(part, right, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next round writes the tile again, the caller the weights
  }
}

}  // namespace rudnn
