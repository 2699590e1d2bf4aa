// attention: one pass over the keys with a running softmax.
#include "common/metal/instance.h"
#include "metal/tiles.h"

using namespace metal;
using namespace rudnn;

constant bool kAlignedKeys [[function_constant(kAlignedKeysConstant)]];
constant bool kAlignedValues [[function_constant(kAlignedValuesConstant)]];
constant bool kHasMask [[function_constant(kHasMaskConstant)]];
constant bool kHasBias [[function_constant(kHasBiasConstant)]];
constant int kBiasType [[function_constant(kBiasTypeConstant)]];
constant bool kHasSinks [[function_constant(kHasSinksConstant)]];
constant int kSinksType [[function_constant(kSinksTypeConstant)]];
constant bool kHasSplits [[function_constant(kHasSplitsConstant)]];

// Over the lanes that have elements of the same row; each of them gets the same bits.
template <typename Product>
inline float row_maximum(float x) {
  for (ushort distance = 1; distance < kSimdgroupLanes; distance *= 2)
    if ((Product::kRowLanes & distance) != 0) x = precise::fmax(x, simd_shuffle_xor(x, distance));
  return x;
}
template <typename Product>
inline float row_sum(float x) {
  for (ushort distance = 1; distance < kSimdgroupLanes; distance *= 2)
    if ((Product::kRowLanes & distance) != 0) x += simd_shuffle_xor(x, distance);
  return x;
}

// The softmax of a thread's rows over the keys so far.
template <typename U>
struct RunningSoftmax {
  using Product = typename U::Product;
  float maximum[Product::kThreadRows];
  float sum[Product::kThreadRows];  // of the weights, which are relative to softmax_base(maximum)

  // Turns products into weights and brings the result to the new maximum.
  void add(constant AttentionArgs& args, ScoreOperands operands, threadgroup const QueryRow* rows, Visible visible,
           long key, uint index, thread Product& product, thread Product& result,
           threadgroup typename U::Weight* weights) {
    for (int thread_row = 0; thread_row < Product::kThreadRows; ++thread_row) {
      const int first = thread_row * U::kRowElements;
      const int row = Product::row_of(first, index);
      float largest = -INFINITY;
      for (int element = first; element < first + U::kRowElements; ++element) {
        float score = -INFINITY;
        if (visible.has(element)) {
          score = score_of(product.value(element), args.scale, args.softcap) +
                  operands.addend(args, rows[row], key + Product::column_of(element, index));
        }
        product.set(element, score);
        largest = precise::fmax(largest, score);
      }
      const float old_maximum = maximum[thread_row];
      maximum[thread_row] = precise::fmax(old_maximum, row_maximum<Product>(largest));
      const float base = softmax_base(maximum[thread_row]);
      const float correction = exponential(old_maximum - base);
      float added = 0.0f;
      for (int element = first; element < first + U::kRowElements; ++element) {
        const float weight = exponential(product.value(element) - base);
        weights[U::Weights::offset_of(row, Product::column_of(element, index))] = typename U::Weight(weight);
        added += weight;
        result.set(element, result.value(element) * correction);
      }
      sum[thread_row] = sum[thread_row] * correction + row_sum<Product>(added);
    }
  }
};

template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void attention(
    constant AttentionArgs& args [[buffer(kArgsBuffer)]], device const T* query [[buffer(kQueryBuffer)]],
    device const T* keys [[buffer(kKeyBuffer)]], device const T* values [[buffer(kValueBuffer)]],
    device const uchar* mask [[buffer(kMaskBuffer), function_constant(kHasMask)]],
    device const void* bias [[buffer(kBiasBuffer), function_constant(kHasBias)]],
    device const void* sinks [[buffer(kSinksBuffer), function_constant(kHasSinks)]],
    device T* output [[buffer(kOutputBuffer)]], device float* lse [[buffer(kLseBuffer)]],
    device float* split_sums [[buffer(kSplitSumsBuffer), function_constant(kHasSplits)]],
    device float* split_maxima [[buffer(kSplitMaximaBuffer), function_constant(kHasSplits)]],
    device float* split_weights [[buffer(kSplitWeightsBuffer), function_constant(kHasSplits)]],
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
  const int split = int(group.x) % args.splits;
  const RowTile tile = kept_tile_of(args, key_head, group.x / args.splits);
  const long first_column = long(group.z) * kTileColumns;
  const HeadRows<T> kept = rows_of_queries(query, args.query, batch, tile, args.queries, args.head_dim);
  const HeadRows<T> taken = rows_of_keys(keys, args.key, batch, key_head, args.keys, args.head_dim);
  const HeadRows<T> added = rows_of_keys(values, args.value, batch, key_head, args.keys, args.value_dim);
  if (int(index) < kTileRows) rows[index] = query_row_of(args, batch, tile, int(index));

  Product result;
  result.clear();
  RunningSoftmax<U> softmax;
  for (int thread_row = 0; thread_row < Product::kThreadRows; ++thread_row) {
    const int row = Product::row_of(thread_row * U::kRowElements, index);
    float sink = -INFINITY;
    if (kHasSinks && !kHasSplits && row < tile.count)
      sink = element_at(sinks, kSinksType, place_of(tile, row, args.queries).head);
    softmax.maximum[thread_row] = sink;
    softmax.sum[thread_row] = sink == -INFINITY ? 0.0f : 1.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const TileKeys tile_range = tile_keys(args, tile);
  const long split_begin = split * args.split_keys;
  const long begin = max(split_begin, tile_range.earliest.first / kTileColumns * kTileColumns);
  const long end = min(split_begin + args.split_keys, tile_range.latest.last);
  for (long key = begin; key < end; key += kTileColumns) {
    const int count = int(min(long(kTileColumns), end - key));
    const Visible visible = visible_elements<PairsOf<Product, false>>(
        args, operands, rows, tile.count, key, key + count, tile_range.all_have(key, key + count), votes, index);
    if (!visible.some) continue;
    Product product;
    multiply_rows<U>(left, right, kept, tile.query, taken, key, kAlignedKeys, index, product);
    softmax.add(args, operands, rows, visible, key, index, product, result, weights);
    add_weighted_rows<U>(weights, right, added, key, count, first_column, kAlignedValues, visible.all, votes, index,
                         result);
  }

  const long all_rows = args.batch * args.heads * args.queries;
  for (int element = 0; element < Product::kElements; ++element) {
    const int row = Product::row_of(element, index);
    const long column = first_column + Product::column_of(element, index);
    if (row >= tile.count || column >= args.value_dim) continue;
    const float maximum = softmax.maximum[element / U::kRowElements];
    const float sum = softmax.sum[element / U::kRowElements];
    const long line = row_index(args, batch, place_of(tile, row, args.queries));
    if (kHasSplits) {
      const long part = split * all_rows + line;
      split_sums[part * args.value_dim + column] = result.value(element);
      if (column == 0) {
        split_maxima[part] = maximum;
        split_weights[part] = sum;
      }
    } else {
      output[line * args.value_dim + column] = T(sum == 0.0f ? 0.0f : result.value(element) / sum);
      if (column == 0) lse[line] = sum == 0.0f ? -INFINITY : maximum + natural_logarithm(sum);
    }
  }
}

// Adds up the splits of each row in their order, but for those without keys, with the sink.
template <typename T>
[[kernel]] void merge_splits(constant AttentionArgs& args [[buffer(kArgsBuffer)]],
                             device const void* sinks [[buffer(kSinksBuffer), function_constant(kHasSinks)]],
                             device const float* split_sums [[buffer(kSplitSumsBuffer)]],
                             device const float* split_maxima [[buffer(kSplitMaximaBuffer)]],
                             device const float* split_weights [[buffer(kSplitWeightsBuffer)]],
                             device T* output [[buffer(kOutputBuffer)]], device float* lse [[buffer(kLseBuffer)]],
                             uint2 position [[thread_position_in_grid]]) {
  const long all_rows = args.batch * args.heads * args.queries;
  const long column = position.x;
  const long row = position.y;
  if (column >= args.value_dim || row >= all_rows) return;
  const float sink = kHasSinks ? element_at(sinks, kSinksType, row / args.queries % args.heads) : -INFINITY;
  float maximum = sink;
  for (int split = 0; split < args.splits; ++split)
    maximum = precise::fmax(maximum, split_maxima[split * all_rows + row]);
  const float base = softmax_base(maximum);
  float sum = exponential(sink - base);
  float result = 0.0f;
  for (int split = 0; split < args.splits; ++split) {
    const long part = split * all_rows + row;
    const float weight = exponential(split_maxima[part] - base);
    if (split_weights[part] == 0.0f) continue;
    sum = fma(weight, split_weights[part], sum);
    result = fma(weight, split_sums[part * args.value_dim + column], result);
  }
  output[row * args.value_dim + column] = T(sum == 0.0f ? 0.0f : result / sum);
  if (column == 0) lse[row] = sum == 0.0f ? -INFINITY : maximum + natural_logarithm(sum);
}

INSTANCE(attention_scalar_float, attention, float, false)
INSTANCE(attention_scalar_half, attention, half, false)
INSTANCE(attention_scalar_bfloat, attention, bfloat, false)
INSTANCE(attention_matrix_half, attention, half, true)
INSTANCE(attention_matrix_bfloat, attention, bfloat, true)

INSTANCE(merge_splits_float, merge_splits, float)
INSTANCE(merge_splits_half, merge_splits, half)
INSTANCE(merge_splits_bfloat, merge_splits, bfloat)
