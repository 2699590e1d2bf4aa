// attention_backward: gradients over the same tiles. Probabilities are computed again from the log-sum-exp.
#include "common/compensated_sum.h"
#include "common/metal/instance.h"
#include "metal/tiles.h"

using namespace metal;
using namespace rudnn;

constant bool kAlignedKeys [[function_constant(kAlignedKeysConstant)]];
constant bool kAlignedValues [[function_constant(kAlignedValuesConstant)]];
constant bool kHasMask [[function_constant(kHasMaskConstant)]];
constant bool kHasBias [[function_constant(kHasBiasConstant)]];
constant int kBiasType [[function_constant(kBiasTypeConstant)]];
constant int kSinksType [[function_constant(kSinksTypeConstant)]];

// delta [B, Hq, Sq] = the sums of grad * output, a thread to a row. They are in the order of ScalarProduct: of a single
// key, delta is then the product of gradient and value, and the score's gradient 0.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void attention_delta(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], device const T* grads [[buffer(kGradBuffer)]],
    device const T* outputs [[buffer(kOutputBuffer)]], device float* delta [[buffer(kDeltaBuffer)]],
    uint2 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  using Rows = Tile<T, kTileThreads, true>;
  threadgroup T grad_tile[Rows::kSize];
  threadgroup T output_tile[Rows::kSize];
  const long batch = group.y;
  const long first = long(group.x) * kTileThreads;
  const long rows = args.heads * args.queries;
  const RowTile tile = {int(first / args.queries), first % args.queries, int(min(long(kTileThreads), rows - first))};
  const HeadRows<T> grad = rows_of_queries(grads, args.grad, batch, tile, args.queries, args.value_dim);
  const HeadRows<T> output = rows_of_queries(outputs, args.output, batch, tile, args.queries, args.value_dim);
  float sum = 0.0f;
  for (long column = 0; column < args.value_dim; column += Rows::kDepth) {
    Rows::load(grad_tile, grad, tile.query, column, kAlignedValues, index);
    Rows::load(output_tile, output, tile.query, column, kAlignedValues, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float partial = 0.0f;
    for (int depth = 0; depth < Rows::kDepth; ++depth) {
      const int offset = Rows::offset_of(int(index), depth);
      const float value = float(output_tile[offset]);
      // An output of 0 may be that of a row without keys, whose gradient does not show.
      if (value != 0.0f) partial = fma(float(grad_tile[offset]), value, partial);
    }
    sum += partial;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next round writes the tiles again
  }
  if (int(index) < tile.count) delta[batch * rows + first + index] = sum;
}

inline QueryRow query_row_with_sums(constant AttentionArgs& args, device const float* lse, device const float* delta,
                                    long batch, RowTile tile, int row) {
  QueryRow query_row = query_row_of(args, batch, tile, row);
  if (row >= tile.count) return query_row;
  const long line = row_index(args, batch, place_of(tile, row, args.queries));
  query_row.lse = lse[line];
  query_row.delta = delta[line];
  return query_row;
}

// The probability of a pair, and the derivative of its score with what is added to it by the product of query and key,
// but for the scale.
struct Probability {
  float value;
  float slope;
};

inline Probability probability_of(constant AttentionArgs& args, ScoreOperands operands, QueryRow row, long key,
                                  float product) {
  const float score = score_of(product, args.scale, args.softcap);
  return {exponential_of_difference(score + operands.addend(args, row, key), row.lse),
          score_slope(score, args.softcap)};
}

// The gradient of queries, from tiles of queries that stay and keys that are taken.
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void attention_grad_query(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], device const T* query [[buffer(kQueryBuffer)]],
    device const T* keys [[buffer(kKeyBuffer)]], device const T* values [[buffer(kValueBuffer)]],
    device const uchar* mask [[buffer(kMaskBuffer), function_constant(kHasMask)]],
    device const void* bias [[buffer(kBiasBuffer), function_constant(kHasBias)]],
    device const T* grads [[buffer(kGradBuffer)]], device const float* lse [[buffer(kLseBuffer)]],
    device const float* delta [[buffer(kDeltaBuffer)]], device T* gradient [[buffer(kGradientBuffer)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  using U = Unit<T, kMatrixUnits>;
  using Product = typename U::Product;
  threadgroup T left[U::Kept::kSize];
  threadgroup T right[U::kRightSize];
  threadgroup typename U::Weight weights[U::Weights::kSize];
  threadgroup QueryRow rows[kTileRows];
  threadgroup uint votes[kTileThreads / kSimdgroupLanes];
  const ScoreOperands operands = {kHasMask ? mask : nullptr, kHasBias ? bias : nullptr, kHasMask, kHasBias, kBiasType};
  const long batch = group.y / args.key_heads;
  const int key_head = int(group.y % uint(args.key_heads));
  const long first_column = long(group.z) * kTileColumns;
  const RowTile tile = kept_tile_of(args, key_head, group.x);
  const HeadRows<T> query_rows = rows_of_queries(query, args.query, batch, tile, args.queries, args.head_dim);
  const HeadRows<T> grad_rows = rows_of_queries(grads, args.grad, batch, tile, args.queries, args.value_dim);
  const HeadRows<T> key_rows = rows_of_keys(keys, args.key, batch, key_head, args.keys, args.head_dim);
  const HeadRows<T> value_rows = rows_of_keys(values, args.value, batch, key_head, args.keys, args.value_dim);
  if (int(index) < kTileRows) rows[index] = query_row_with_sums(args, lse, delta, batch, tile, int(index));
  Product result;
  result.clear();
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const TileKeys tile_range = tile_keys(args, tile);
  const long begin = tile_range.earliest.first / kTileColumns * kTileColumns;
  const long end = tile_range.latest.last;
  for (long key = begin; key < end; key += kTileColumns) {
    const int count = int(min(long(kTileColumns), end - key));
    const Visible visible = visible_elements<PairsOf<Product, false>>(
        args, operands, rows, tile.count, key, key + count, tile_range.all_have(key, key + count), votes, index);
    if (!visible.some) continue;
    Product product;
    Product grad_product;
    multiply_rows<U>(left, right, query_rows, tile.query, key_rows, key, kAlignedKeys, index, product);
    multiply_rows<U>(left, right, grad_rows, tile.query, value_rows, key, kAlignedValues, index, grad_product);
    for (int element = 0; element < Product::kElements; ++element) {
      const int row = Product::row_of(element, index);
      const int column = Product::column_of(element, index);
      float weight = 0.0f;
      if (visible.has(element)) {
        const Probability probability = probability_of(args, operands, rows[row], key + column, product.value(element));
        weight = probability.value * (grad_product.value(element) - rows[row].delta) * probability.slope;
      }
      weights[U::Weights::offset_of(row, column)] = typename U::Weight(weight);
    }
    add_weighted_rows<U>(weights, right, key_rows, key, count, first_column, kAlignedKeys, visible.all, votes, index,
                         result);
  }
  for (int element = 0; element < Product::kElements; ++element) {
    const int row = Product::row_of(element, index);
    const long column = first_column + Product::column_of(element, index);
    if (row >= tile.count || column >= args.head_dim) continue;
    const long line = row_index(args, batch, place_of(tile, row, args.queries));
    gradient[line * args.head_dim + column] = T(result.value(element) * args.scale);
  }
}

// The gradient of keys, or of values, from tiles of keys that stay and queries that are taken.
template <typename T, bool kMatrixUnits, bool kOfValues>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void attention_grad_keys(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], device const T* query [[buffer(kQueryBuffer)]],
    device const T* keys [[buffer(kKeyBuffer)]], device const T* values [[buffer(kValueBuffer)]],
    device const uchar* mask [[buffer(kMaskBuffer), function_constant(kHasMask)]],
    device const void* bias [[buffer(kBiasBuffer), function_constant(kHasBias)]],
    device const T* grads [[buffer(kGradBuffer)]], device const float* lse [[buffer(kLseBuffer)]],
    device const float* delta [[buffer(kDeltaBuffer)]], device T* gradient [[buffer(kGradientBuffer)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  using U = Unit<T, kMatrixUnits>;
  using Product = typename U::Product;
  threadgroup T left[U::Kept::kSize];
  threadgroup T right[U::kRightSize];
  threadgroup typename U::Weight weights[U::Weights::kSize];
  threadgroup QueryRow rows[kTileColumns];
  threadgroup uint votes[kTileThreads / kSimdgroupLanes];
  const ScoreOperands operands = {kHasMask ? mask : nullptr, kHasBias ? bias : nullptr, kHasMask, kHasBias, kBiasType};
  const long batch = group.y / args.key_heads;
  const int key_head = int(group.y % uint(args.key_heads));
  const long first_column = long(group.z) * kTileColumns;
  const long first_key = long(group.x) * kTileRows;
  const long end_key = min(first_key + kTileRows, args.keys);
  const HeadRows<T> key_rows = rows_of_keys(keys, args.key, batch, key_head, args.keys, args.head_dim);
  const HeadRows<T> value_rows = rows_of_keys(values, args.value, batch, key_head, args.keys, args.value_dim);
  Product result;
  result.clear();

  const long tiles = row_tiles_of(args.queries, args.heads / args.key_heads, kTileColumns);
  for (long tile_index = 0; tile_index < tiles; ++tile_index) {
    const RowTile tile = row_tile_of(args, key_head, tile_index, kTileColumns);
    const TileKeys tile_range = tile_keys(args, tile);
    if (!tile_range.some_have(first_key, end_key)) continue;
    if (int(index) < kTileColumns) rows[index] = query_row_with_sums(args, lse, delta, batch, tile, int(index));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Visible visible = visible_elements<PairsOf<Product, true>>(
        args, operands, rows, tile.count, first_key, end_key, tile_range.all_have(first_key, end_key), votes, index);
    if (!visible.some) continue;
    const HeadRows<T> query_rows = rows_of_queries(query, args.query, batch, tile, args.queries, args.head_dim);
    const HeadRows<T> grad_rows = rows_of_queries(grads, args.grad, batch, tile, args.queries, args.value_dim);
    Product product;
    Product grad_product;
    multiply_rows<U>(left, right, key_rows, first_key, query_rows, tile.query, kAlignedKeys, index, product);
    if (!kOfValues)
      multiply_rows<U>(left, right, value_rows, first_key, grad_rows, tile.query, kAlignedValues, index, grad_product);
    for (int element = 0; element < Product::kElements; ++element) {
      const int row = Product::row_of(element, index);
      const int column = Product::column_of(element, index);
      float weight = 0.0f;
      if (visible.has(element)) {
        const Probability probability =
            probability_of(args, operands, rows[column], first_key + row, product.value(element));
        weight = kOfValues ? probability.value
                           : probability.value * (grad_product.value(element) - rows[column].delta) * probability.slope;
      }
      weights[U::Weights::offset_of(row, column)] = typename U::Weight(weight);
    }
    if (kOfValues) {
      add_weighted_rows<U>(weights, right, grad_rows, tile.query, tile.count, first_column, kAlignedValues, visible.all,
                           votes, index, result);
    } else {
      add_weighted_rows<U>(weights, right, query_rows, tile.query, tile.count, first_column, kAlignedKeys, visible.all,
                           votes, index, result);
    }
  }
  const long width = kOfValues ? args.value_dim : args.head_dim;
  const float factor = kOfValues ? 1.0f : args.scale;
  for (int element = 0; element < Product::kElements; ++element) {
    const long key = first_key + Product::row_of(element, index);
    const long column = first_column + Product::column_of(element, index);
    if (key >= end_key || column >= width) continue;
    const long line = (batch * args.key_heads + key_head) * args.keys + key;
    gradient[line * width + column] = T(result.value(element) * factor);
  }
}

// Stores an element of a result whose type is not the kernel's.
inline void store_element(device void* elements, int type, long position, float x) {
  switch (type) {
    case kFloatElements:
      static_cast<device float*>(elements)[position] = x;
      break;
    case kHalfElements:
      static_cast<device half*>(elements)[position] = half(x);
      break;
    default:
      static_cast<device bfloat*>(elements)[position] = bfloat(x);
  }
}

// Positions of an axis of the scores: `step` of them from `first` on if the bias has the axis, else all.
struct AxisRange {
  long first;
  long end;
};

inline AxisRange axis_range(long bias_size, long size, long first, long step) {
  if (bias_size == size) return {first, min(first + step, size)};
  return {0, size};
}

// The gradient of a tile of the bias, summed over the axes that it does not have.
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void attention_grad_bias(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], constant BiasArgs& shape [[buffer(kBiasArgsBuffer)]],
    device const T* query [[buffer(kQueryBuffer)]], device const T* keys [[buffer(kKeyBuffer)]],
    device const T* values [[buffer(kValueBuffer)]],
    device const uchar* mask [[buffer(kMaskBuffer), function_constant(kHasMask)]],
    device const void* bias [[buffer(kBiasBuffer), function_constant(kHasBias)]],
    device const T* grads [[buffer(kGradBuffer)]], device const float* lse [[buffer(kLseBuffer)]],
    device const float* delta [[buffer(kDeltaBuffer)]], device void* gradient [[buffer(kGradientBuffer)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  using U = Unit<T, kMatrixUnits>;
  using Product = typename U::Product;
  threadgroup T left[U::Kept::kSize];
  threadgroup T right[U::kRightSize];
  threadgroup QueryRow rows[kTileRows];
  threadgroup uint votes[kTileThreads / kSimdgroupLanes];
  threadgroup float sum_values[kTileRows][kTileColumns];
  threadgroup float sum_lost[kTileRows][kTileColumns];
  const ScoreOperands operands = {kHasMask ? mask : nullptr, kHasBias ? bias : nullptr, kHasMask, kHasBias, kBiasType};
  const int heads_per_key_head = args.heads / args.key_heads;
  const long bias_head = group.z % shape.heads;
  const long bias_batch = group.z / shape.heads;
  const AxisRange batches = axis_range(shape.batch, args.batch, bias_batch, 1);
  const AxisRange heads = axis_range(shape.heads, args.heads, bias_head, 1);
  const AxisRange row_range = axis_range(shape.queries, args.queries, long(group.y) * kTileRows, kTileRows);
  const AxisRange key_range = axis_range(shape.keys, args.keys, long(group.x) * kTileColumns, kTileColumns);
  CompensatedSum sums[Product::kElements];
  for (int element = 0; element < Product::kElements; ++element) sums[element] = {0.0f, 0.0f};

  for (long batch = batches.first; batch < batches.end; ++batch) {
    for (int head = int(heads.first); head < int(heads.end); ++head) {
      const int key_head = head / heads_per_key_head;
      const HeadRows<T> key_rows = rows_of_keys(keys, args.key, batch, key_head, args.keys, args.head_dim);
      const HeadRows<T> value_rows = rows_of_keys(values, args.value, batch, key_head, args.keys, args.value_dim);
      for (long first_query = row_range.first; first_query < row_range.end; first_query += kTileRows) {
        const RowTile tile = {head, first_query, int(min(long(kTileRows), row_range.end - first_query))};
        const HeadRows<T> query_rows = rows_of_queries(query, args.query, batch, tile, args.queries, args.head_dim);
        const HeadRows<T> grad_rows = rows_of_queries(grads, args.grad, batch, tile, args.queries, args.value_dim);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous tile's rows have been read
        if (int(index) < kTileRows) rows[index] = query_row_with_sums(args, lse, delta, batch, tile, int(index));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const TileKeys tile_range = tile_keys(args, tile);
        for (long key = key_range.first; key < key_range.end; key += kTileColumns) {
          const long end = min(key + kTileColumns, key_range.end);
          if (!tile_range.some_have(key, end)) continue;
          const Visible visible = visible_elements<PairsOf<Product, false>>(
              args, operands, rows, tile.count, key, end, tile_range.all_have(key, end), votes, index);
          if (!visible.some) continue;
          Product product;
          Product grad_product;
          multiply_rows<U>(left, right, query_rows, tile.query, key_rows, key, kAlignedKeys, index, product);
          multiply_rows<U>(left, right, grad_rows, tile.query, value_rows, key, kAlignedValues, index, grad_product);
          for (int element = 0; element < Product::kElements; ++element) {
            if (!visible.has(element)) continue;
            const QueryRow row = rows[Product::row_of(element, index)];
            const long element_key = key + Product::column_of(element, index);
            const Probability probability = probability_of(args, operands, row, element_key, product.value(element));
            sums[element] = added(sums[element], probability.value * (grad_product.value(element) - row.delta));
          }
        }
      }
    }
  }

  for (int element = 0; element < Product::kElements; ++element) {
    const int row = Product::row_of(element, index);
    const int column = Product::column_of(element, index);
    sum_values[row][column] = sums[element].value;
    sum_lost[row][column] = sums[element].lost;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Along an axis that the bias does not have, the elements of the tile are those of its first row or column.
  const bool has_rows = shape.queries == args.queries;
  const bool has_columns = shape.keys == args.keys;
  const int row_count = has_rows ? int(row_range.end - row_range.first) : 1;
  const int column_count = has_columns ? int(key_range.end - key_range.first) : 1;
  for (int element = int(index); element < row_count * column_count; element += kTileThreads) {
    const int first_row = element / column_count;
    const int first_column = element % column_count;
    const int end_row = has_rows ? first_row + 1 : kTileRows;
    const int end_column = has_columns ? first_column + 1 : kTileColumns;
    CompensatedSum sum = {0.0f, 0.0f};
    for (int row = first_row; row < end_row; ++row)
      for (int column = first_column; column < end_column; ++column)
        sum = added(sum, CompensatedSum{sum_values[row][column], sum_lost[row][column]});
    const long line = (bias_batch * shape.heads + bias_head) * shape.queries + long(group.y) * kTileRows + first_row;
    store_element(gradient, kBiasType, line * shape.keys + long(group.x) * kTileColumns + first_column, rounded(sum));
  }
}

// The gradient of a head's sink: its probability is minus what the rows' keys lose to it.
[[kernel, max_total_threads_per_threadgroup(kSinkThreads)]] void attention_grad_sinks(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], device const void* sinks [[buffer(kSinksBuffer)]],
    device const float* lse [[buffer(kLseBuffer)]], device const float* delta [[buffer(kDeltaBuffer)]],
    device void* gradient [[buffer(kGradientBuffer)]], uint head [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float sum_values[kSinkThreads];
  threadgroup float sum_lost[kSinkThreads];
  const float sink = element_at(sinks, kSinksType, head);
  CompensatedSum sum = {0.0f, 0.0f};
  for (long batch = 0; batch < args.batch; ++batch) {
    const long first = (batch * args.heads + head) * args.queries;
    for (long row = first + index; row < first + args.queries; row += kSinkThreads)
      if (sink != -INFINITY) sum = added(sum, -exponential_of_difference(sink, lse[row]) * delta[row]);
  }
  sum_values[index] = sum.value;
  sum_lost[index] = sum.lost;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index != 0) return;
  for (int thread_index = 1; thread_index < kSinkThreads; ++thread_index)
    sum = added(sum, CompensatedSum{sum_values[thread_index], sum_lost[thread_index]});
  store_element(gradient, kSinksType, head, rounded(sum));
}

INSTANCE(attention_delta_float, attention_delta, float)
INSTANCE(attention_delta_half, attention_delta, half)
INSTANCE(attention_delta_bfloat, attention_delta, bfloat)

#define GRADIENT_INSTANCES(T, unit, kMatrixUnits)                                         \
  INSTANCE(attention_grad_query_##unit##_##T, attention_grad_query, T, kMatrixUnits)      \
  INSTANCE(attention_grad_key_##unit##_##T, attention_grad_keys, T, kMatrixUnits, false)  \
  INSTANCE(attention_grad_value_##unit##_##T, attention_grad_keys, T, kMatrixUnits, true) \
  INSTANCE(attention_grad_bias_##unit##_##T, attention_grad_bias, T, kMatrixUnits)
GRADIENT_INSTANCES(float, scalar, false)
GRADIENT_INSTANCES(half, scalar, false)
GRADIENT_INSTANCES(bfloat, scalar, false)
GRADIENT_INSTANCES(half, matrix, true)
GRADIENT_INSTANCES(bfloat, matrix, true)
