// Attention by products of bfloat16 pairs. Include after a struct Products with
//
//   Session           what a thread must have while it multiplies
//   kPauses           how many pairs of pauses multiply() makes in a step
//   multiply          32 rows of a left operand by 32 columns of a right one; in a pair of pauses it calls
//                     between(std::integral_constant<int, 0>()) and then the same with 1, for what else is to be done
//   multiply_narrow   32 rows by 16 columns
//
// of operands as common/cpu/amx.h lays them out: tile (i, step) of a left operand is 16 i rows and `step` times
// step_stride from its start, and a right operand has, for each step, one tile for every 16 columns. Results are rows
// of float32.
//
// Scores are products of keys and queries, so that rows of keys are left operands as they lie in memory and the maximum
// over keys is taken across vectors. Two rows of weights make pairs for the product with the values, which are
// transposed once for all tiles of rows.
#include <type_traits>

#include "cpu/attention_tiles.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

inline int64_t packed(int64_t dim) { return round_up(dim, kPackedDim); }

inline uint32_t first_bits(int64_t count) { return static_cast<uint32_t>((uint64_t{1} << count) - 1); }

// By one instruction, to which denormals are 0.
template <>
inline void store_row<bfloat16>(const float* sums, float factor, int64_t dim, bfloat16* output) {
  for (int64_t i = 0; i < dim; i += kWidth) {
    const auto columns = static_cast<__mmask16>(first_bits(smaller(dim - i, kWidth)));
    _mm256_mask_storeu_epi16(output + i, columns, narrow(load(sums + i, Full{}) * broadcast(factor)));
  }
}

inline bfloat16* as_bfloat16(float* memory) { return reinterpret_cast<bfloat16*>(memory); }

// 2^x for x < 100 with a relative error of 6e-7; 0 below -100, so that no product is denormal; NaN for NaN. By a table
// and a short series, since beside tiles multiplications have one port only.
inline Vec exp2_or_zero(Vec x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x.value, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
  // Adding 1.5 * 2^19 rounds to sixteenths, whose number is then in the low bits.
  const Vec shifted = x + broadcast(786432.0f);
  const Vec r = x - (shifted - broadcast(786432.0f));
  const __m512i sixteenths = _mm512_castps_si512(shifted.value);
  // 2^(i / 16), less what i adds to the bits below the exponent.
  const __m512i powers = _mm512_sub_epi32(
      _mm512_castps_si512(_mm512_setr_ps(1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
                                         1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
                                         1.68179286f, 1.75625217f, 1.83400810f, 1.91520655f)),
      _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 19));
  const Vec power = {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_permutexvar_epi32(sixteenths, powers), _mm512_slli_epi32(sixteenths, 19)))};
  const Vec series = fma(broadcast(0.24022643f), r, broadcast(0.69318771f));
  return {_mm512_maskz_fmadd_ps(kept, (power * r).value, series.value, power.value)};
}

// Elements of two rows as pairs.
inline __m512i pairs_of(Vec even, Vec odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.value, even.value)));
}

// The weights of scores relative to a maximum.
struct WeightOf {
  WeightOf(Vec maximum, float scale)
      : base(where_less(maximum, broadcast(kLowest), broadcast(0.0f), maximum)), factor(broadcast(scale)) {}

  // Subtracted first: of large scores products with the factor are too coarse.
  Vec operator()(Vec score) const { return exp2_or_zero((score - base) * factor); }

  Vec base;
  Vec factor;
};

// Scores [count, width] of one vector of rows become weights relative to the new maximum, which store_pair(key, even,
// odd) takes two keys at a time. Returns what the maximum's change makes of earlier weights.
template <class StorePair>
inline Vec update_lanes(float* scores, int64_t count, int64_t width, float factor, SoftmaxLanes lanes,
                        StorePair&& store_pair) {
  const Vec old_maximum = load(lanes.maximum, Full{});
  Vec even = old_maximum;
  Vec odd = old_maximum;
  for (int64_t key = 0; key < count; key += 2) {
    even = max(load(scores + key * width, Full{}), even);
    odd = max(load(scores + (key + 1) * width, Full{}), odd);
  }
  const Vec maximum = max(even, odd);
  const WeightOf weight_of(maximum, factor);
  const Vec correction = weight_of(old_maximum);
  Vec even_sum = broadcast(0.0f);
  Vec odd_sum = even_sum;
  for (int64_t key = 0; key < count; key += 2) {
    const Vec a = weight_of(load(scores + key * width, Full{}));
    const Vec b = weight_of(load(scores + (key + 1) * width, Full{}));
    even_sum = even_sum + a;
    odd_sum = odd_sum + b;
    store_pair(key, a, b);
  }
  store(lanes.maximum, maximum, Full{});
  store(lanes.sum, fma(load(lanes.sum, Full{}), correction, even_sum + odd_sum), Full{});
  return correction;
}

// The rows of a tile in memory, null beyond them.
struct RowPointers {
  RowPointers(const HeadRows& source, const RowTile& tile) {
    for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
      rows[row] = rows_of<bfloat16>(source, tile.batch, head) + query * source.row_stride;
    });
  }

  const bfloat16* rows[kMaxRowTile] = {};
};

// Rows, of which the first exists, as a right operand of `halves` tiles to a step, whose columns they are; 0 in columns
// without a row.
inline void pack_columns(const bfloat16* const* rows, int64_t dim, int64_t halves, bfloat16* right) {
  for (int64_t half = 0; half < halves; ++half) {
    for (int64_t column = 0; column < dim; column += kPackedDim) {
      const int64_t count = smaller(dim - column, kPackedDim);
      // Without branches, so that they stay in registers.
      __m512i elements[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        const bfloat16* row = rows[16 * half + i];
        const __mmask32 there = row != nullptr ? first_bits(count) : 0;
        elements[i] = _mm512_maskz_loadu_epi16(there, (row != nullptr ? row : rows[0]) + column);
      }
      transpose(elements);
      store_tile(elements, right + (column / kPackedDim * halves + half) * 512);
    }
  }
}

// A chunk of `count` rows of keys or values, with 0 up to a chunk and to whole steps.
inline void copy_rows(const bfloat16* keys, int64_t row_stride, int64_t count, int64_t dim, bfloat16* copy) {
  for (int64_t row = 0; row < kKeyChunk; ++row) {
    for (int64_t column = 0; column < dim; column += kPackedDim) {
      const __m512i elements = row < count ? load_row(keys + row * row_stride, column, dim) : _mm512_setzero_si512();
      _mm512_store_si512(copy + row * packed(dim) + column, elements);
    }
  }
}

inline __mmask32 not_finite(__m512i elements) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(elements, exponent), exponent);
}

// Columns of a chunk of `count` rows as rows of a left operand, with 0 for elements that are not finite. Returns
// whether there are none.
inline bool transpose_chunk(const bfloat16* values, int64_t row_stride, int64_t count, int64_t dim, bfloat16* left) {
  __mmask32 any_bad = 0;
  // Lanes 2 i and 2 i + 1 of a result are the low, or the high, halves of pair 2 i and of pair 2 i + 1.
  alignas(64) uint16_t low[32];
  alignas(64) uint16_t high[32];
  for (int i = 0; i < 32; ++i) {
    low[i] = static_cast<uint16_t>(2 * i);
    high[i] = static_cast<uint16_t>(2 * i + 1);
  }
  const __m512i low_halves = _mm512_load_si512(low);
  const __m512i high_halves = _mm512_load_si512(high);
  for (int64_t column = 0; column < dim; column += kPackedDim) {
    __m512i pairs[2][16];
    for (int half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = 16 * half + i;
        pairs[half][i] = row < count ? load_row(values + row * row_stride, column, dim) : _mm512_setzero_si512();
        const __mmask32 bad = not_finite(pairs[half][i]);
        any_bad |= bad;
        pairs[half][i] = _mm512_maskz_mov_epi16(~bad, pairs[half][i]);
      }
      transpose(pairs[half]);
    }
    for (int i = 0; i < 16; ++i) {
      bfloat16* rows = left + (column + 2 * i) * kKeyChunk;
      _mm512_store_si512(rows, _mm512_permutex2var_epi16(pairs[0][i], low_halves, pairs[1][i]));
      _mm512_store_si512(rows + kKeyChunk, _mm512_permutex2var_epi16(pairs[0][i], high_halves, pairs[1][i]));
    }
  }
  return any_bad == 0;
}

// Rows of a left operand.
struct Rows {
  const bfloat16* data;
  int64_t stride;
};

// What the tiles of a key head share.
struct PackedHead {
  PackedHead(const AttentionArgs& args, int64_t batch, int64_t key_head)
      : problem(args.problem),
        key_rows(rows_of<bfloat16>(problem.key, batch, key_head)),
        value_rows(rows_of<bfloat16>(problem.value, batch, key_head)),
        chunks(ceil_div(problem.keys, kKeyChunk)),
        first_packed(chunks - args.packed_key_chunks),
        value_stride(packed(problem.value_dim) * kKeyChunk) {
    const int64_t head = batch * problem.key_heads + key_head;
    keys =
        static_cast<bfloat16*>(args.packed_keys) + head * args.packed_key_chunks * kKeyChunk * packed(problem.head_dim);
    values = static_cast<bfloat16*>(args.packed_values) + head * chunks * value_stride;
    values_finite = args.values_finite + head * chunks;
  }

  Rows keys_of_chunk(int64_t chunk) const {
    if (chunk < first_packed) return {key_rows + chunk * kKeyChunk * problem.key.row_stride, problem.key.row_stride};
    return {packed_chunk(chunk), packed(problem.head_dim)};
  }
  bfloat16* packed_chunk(int64_t chunk) const {
    return keys + (chunk - first_packed) * kKeyChunk * packed(problem.head_dim);
  }

  const AttentionProblem& problem;
  const bfloat16* key_rows;
  const bfloat16* value_rows;
  int64_t chunks;
  int64_t first_packed;
  int64_t value_stride;  // elements of a chunk
  bfloat16* keys;
  bfloat16* values;
  uint8_t* values_finite;
};

void pack_chunk(const PackedHead& head, int64_t chunk) {
  const AttentionProblem& problem = head.problem;
  const int64_t key = chunk * kKeyChunk;
  const int64_t count = smaller(kKeyChunk, problem.keys - key);
  // The values of the next chunk: the hardware foresees too little of rows that are read in columns.
  for (int64_t row = key + kKeyChunk; row < smaller(key + 2 * kKeyChunk, problem.keys); ++row) {
    constexpr int64_t kLine = 64 / sizeof(bfloat16);
    const bfloat16* values = head.value_rows + row * problem.value.row_stride;
    for (int64_t column = 0; column < problem.value_dim; column += kLine) __builtin_prefetch(values + column);
  }
  if (chunk >= head.first_packed) {
    copy_rows(head.key_rows + key * problem.key.row_stride, problem.key.row_stride, count, problem.head_dim,
              head.packed_chunk(chunk));
  }
  head.values_finite[chunk] =
      transpose_chunk(head.value_rows + key * problem.value.row_stride, problem.value.row_stride, count,
                      problem.value_dim, head.values + chunk * head.value_stride);
}

// While a chunk is worked on, the bias of the one that comes so many chunks later is fetched. It is needed a chunk
// earlier where it does not wait for the products.
inline constexpr int64_t kBiasAhead = 2;

// Chunks of keys whose weights are multiplied by their values together.
inline constexpr int64_t kRunChunks = 4;

// What is known of a tile of rows after some keys. All but the queries have kAcceleratedRows lanes.
struct TileState {
  TileState() = default;
  TileState(const AttentionProblem& problem, Scratch& scratch) {
    queries = as_bfloat16(scratch.take(packed(problem.head_dim) * kAcceleratedRows / 2));
    output = scratch.take(packed(problem.value_dim) * kAcceleratedRows);
    origin = scratch.take(kAcceleratedRows);
    base = scratch.take(kAcceleratedRows);
    sum = scratch.take(kAcceleratedRows);
    rounded_sum = scratch.take(kAcceleratedRows);
  }

  bfloat16* queries = nullptr;   // right operand
  float* output = nullptr;       // [Dv, lanes], nothing yet unless has_output
  float* origin = nullptr;       // of scores
  float* base = nullptr;         // what weights are relative to, in units of log 2 from the origin
  float* sum = nullptr;          // of the weights
  float* rounded_sum = nullptr;  // of the weights as the products have them: of one value the mean is that value
  bool has_output = false;
};

// Tiles that attend to a part of the keys one after the other before the next part's turn, where the keys and values of
// a head are too many for the cache, and the bytes of a part.
inline constexpr int kTilesTogether = 8;
inline constexpr int64_t kPartBytes = 1 << 20;

inline int64_t keys_of_part(const AttentionProblem& problem) {
  const int64_t key_bytes = (packed(problem.head_dim) + packed(problem.value_dim)) * sizeof(bfloat16);
  return larger(kPartBytes / key_bytes / kKeyChunk, 1) * kKeyChunk;
}
inline int tiles_together(const AttentionProblem& problem) {
  return problem.keys > keys_of_part(problem) ? kTilesTogether : 1;
}

// The memory of tiles of rows.
struct TileMemory {
  TileMemory(const AttentionProblem& problem, float* memory) : value_dim(packed(problem.value_dim)) {
    Scratch scratch(memory);
    for (auto& part : weights) part = as_bfloat16(scratch.take(kRunChunks * kChunkSize / 2));
    for (auto& part : scores) part = scratch.take(kChunkSize);
    addends = scratch.take(kChunkSize);
    output_rows = scratch.take(kAcceleratedRows * value_dim);
    maximum = scratch.take(kAcceleratedRows);
    for (int i = 0; i < tiles_together(problem); ++i) tiles[i] = TileState(problem, scratch);
    size = scratch.taken();
  }

  static constexpr int64_t kChunkSize = kKeyChunk * kAcceleratedRows;

  int64_t value_dim;
  bfloat16* weights[2];  // right operands of two runs of chunks, a step for each chunk
  float* scores[2];      // of two chunks of keys
  float* addends;        // of a chunk
  float* output_rows;    // [lanes, Dv]
  float* maximum;        // what the weights are relative to, as a score
  TileState tiles[kTilesTogether];
  int64_t size;
};

// The keys of a chunk that the rows of a tile have, a bit for each.
struct KeptKeys {
  alignas(64) uint32_t of_row[kAcceleratedRows];
};

// What the mask keeps of a chunk of `count` keys. Returns whether that is any.
inline bool keep_by_mask(const ScoreOperand& mask, const OperandRows& rows, const RowTile& tile, int64_t key,
                         int64_t count, KeptKeys& kept) {
  const auto keys_of_row = [&](int64_t row) {
    const auto* source = rows.at<uint8_t>(row, key);
    if (mask.key_stride == 1) {
      const __m256i bytes = _mm256_maskz_loadu_epi8(first_bits(count), source);
      return static_cast<uint32_t>(_mm256_test_epi8_mask(bytes, bytes));
    }
    uint32_t keys = 0;
    for (int64_t i = 0; i < count; ++i) keys |= static_cast<uint32_t>(source[i * mask.key_stride] != 0) << i;
    return keys;
  };
  uint32_t any = 0;
  if (same_for_all_rows(mask, tile)) {
    any = keys_of_row(0);
    for (uint32_t& keys : kept.of_row) keys = any;
    return any != 0;
  }
  for (int64_t row = 0; row < kAcceleratedRows; ++row) {
    kept.of_row[row] = keys_of_row(row);
    any |= kept.of_row[row];
  }
  return any != 0;
}

// Leaves of a chunk what the rows have by causality and the window.
inline void keep_in_range(const AttentionProblem& problem, const RowTile& tile, int64_t key, KeptKeys& kept) {
  const auto before = [&](int64_t position) { return first_bits(larger(smaller(position - key, kKeyChunk), 0)); };
  for_each_row(tile, [&](int64_t row, int64_t, int64_t query) {
    const KeyRange range = keys_of(problem, query);
    kept.of_row[row] &= before(range.last) & ~before(range.first);
  });
}

// The terms of a bias for a chunk of `count` keys: [kKeyChunk, lanes], whatever from `count` on.
template <class T>
inline void transpose_chunk_bias(const OperandRows& bias, int64_t key, int64_t count, float* terms) {
  transpose_bias<T>(bias, key, count, terms);
}

// Terms of neighbouring keys in lanes that are rows of a bias.
struct TermPairs {
  // Those of 16 rows for a chunk of `count` keys, 0 from `count` on. Neighbours stay pairs while rows become columns.
  [[gnu::always_inline]] TermPairs(const OperandRows& bias, int64_t first_row, int64_t key, int64_t count) {
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) pairs[row] = load_row(bias.at<bfloat16>(first_row + row, key), 0, count);
    transpose(pairs);
  }

  Vec of_key(int64_t key) const {
    const __m512i pair = pairs[key / 2];
    const __m512i term = key % 2 == 0 ? _mm512_slli_epi32(pair, 16) : _mm512_and_si512(pair, _mm512_set1_epi32(-65536));
    return {_mm512_castsi512_ps(term)};
  }

  __m512i pairs[16];
};

template <>
inline void transpose_chunk_bias<bfloat16>(const OperandRows& bias, int64_t key, int64_t count, float* terms) {
  for (int64_t first_row = 0; first_row < kAcceleratedRows; first_row += kWidth) {
    const TermPairs rows(bias, first_row, key, count);
#pragma GCC unroll 32
    for (int64_t i = 0; i < kKeyChunk; ++i) store(terms + i * kAcceleratedRows + first_row, rows.of_key(i), Full{});
  }
}

// Addends of the bias alone for a chunk of `count` keys; with `from_rows` only whether any key is left, since Weighing
// adds the terms.
inline Addends fill_chunk_addends(const AttentionProblem& problem, const OperandRows& rows, const RowTile& tile,
                                  bool from_rows, int64_t key, int64_t count, float* addends) {
  const ScoreOperand& bias = problem.bias;
  if (bias.data == nullptr) return Addends::kNone;
  if (has_rows_of_keys(bias, tile)) {
    constexpr uint16_t kExcluded = 0xff80;  // -inf
    // Most often the very first key is left.
    if (from_rows && *rows.at<uint16_t>(0, key) != kExcluded) return Addends::kSome;
    if (!any_left(rows, problem.bias_dtype, key, count)) return Addends::kNothingLeft;
    if (from_rows) return Addends::kSome;
    visit_dtype(problem.bias_dtype, [&](auto element) {
      transpose_chunk_bias<typename decltype(element)::type>(rows, key, count, addends);
    });
    return Addends::kSome;
  }
  AttentionProblem without_mask = problem;
  without_mask.mask.data = nullptr;
  return fill_addends(without_mask, tile, key, count, kAcceleratedRows, addends);
}

// A chunk of keys that a tile of rows attends to.
struct KeyChunk {
  int64_t index = 0;
  int64_t count = 0;  // of keys
  bool exists = false;
  Addends addends = Addends::kNone;
  bool some_excluded = false;  // those that are not kept
  KeptKeys kept;
};

// The first chunk of those before key `end`, from `index` on, in which something takes part.
inline void find_chunk(const AttentionProblem& problem, const OperandRows& mask_rows, const OperandRows& bias_rows,
                       const RowTile& tile, const TileKeys& tile_keys, bool bias_from_rows, int64_t index, int64_t end,
                       float* addends, KeyChunk& chunk) {
  for (; index * kKeyChunk < end; ++index) {
    const int64_t key = index * kKeyChunk;
    const int64_t count = smaller(kKeyChunk, end - key);
    chunk.index = index;
    chunk.count = count;
    chunk.addends = fill_chunk_addends(problem, bias_rows, tile, bias_from_rows, key, count, addends);
    if (chunk.addends == Addends::kNothingLeft) continue;
    const bool partial = !tile_keys.all_have(key, key + kKeyChunk);
    chunk.some_excluded = partial || problem.mask.data != nullptr;
    if (problem.mask.data != nullptr) {
      if (!keep_by_mask(problem.mask, mask_rows, tile, key, count, chunk.kept)) continue;
    } else if (partial) {
      for (uint32_t& keys : chunk.kept.of_row) keys = ~0u;
    }
    if (partial) keep_in_range(problem, tile, key, chunk.kept);
    chunk.exists = true;
    return;
  }
  chunk.exists = false;
}

// Chunks that follow each other, whose weights are there.
struct Run {
  int64_t first = 0;  // chunk
  int64_t chunks = 0;
  int64_t blocks = 0;  // of 32 columns of values that have been added to the output
  bfloat16* weights = nullptr;
};

// The scores of a chunk become weights, of two keys at a time, while products run. Weights are relative to a base near
// the largest score so far: a power of 2, so that a new one changes no bit of them. Where that score is so large that
// its product with the factor is too coarse, it is subtracted from scores first, as their origin; else the origin is 0.
// What it holds is in registers only as long as all that refers to it is inlined.
class Weighing {
 public:
  // bias_rows are those of a bias whose terms are added from there, which needs adds(); else null.
  // What a bias of -inf excludes does not show even if its product is not finite where `products_finite` is false;
  // where it is true, the sum of the weights becomes NaN.
  Weighing(const SoftmaxScoring& scoring, const OperandRows* bias_rows, bool products_finite, const TileState& state,
           const TileMemory& memory)
      : scoring_(scoring),
        bias_rows_(bias_rows),
        added_(adds(scoring, products_finite)),
        memory_(memory),
        factor_(broadcast(scoring.factor)) {
    for (int half = 0; half < 2; ++half) {
      origin_[half] = load(state.origin + half * kWidth, Full{});
      base_[half] = load(state.base + half * kWidth, Full{});
      sum_[half] = load(state.sum + half * kWidth, Full{});
      rounded_sum_[half] = load(state.rounded_sum + half * kWidth, Full{});
      shifted_ |= _mm512_cmp_ps_mask(origin_[half].value, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
    }
  }

  // Whether a score is the scaled product and its term, whatever they are.
  static bool adds(const SoftmaxScoring& scoring, bool products_finite) {
    return products_finite && !scoring.scoring.capped && !scoring.direct;
  }

  // The state of rows of which there are but the sinks' scores, in `base` in units of log 2, and `sum`. No product has
  // a sink's weight, so that it is not rounded.
  static void start_rows(const SoftmaxScoring& scoring, const TileState& state) {
    const Vec factor = broadcast(scoring.factor);
    for (int64_t lane = 0; lane < kAcceleratedRows; lane += kWidth) {
      Vec base = load(state.base + lane, Full{});
      const __mmask16 far = _mm512_cmp_ps_mask(abs(base).value, _mm512_set1_ps(kFarLog2), _CMP_GT_OQ) &
                            _mm512_cmp_ps_mask(abs(base).value, _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
      store(state.origin + lane, Vec{_mm512_maskz_div_ps(far, base.value, factor.value)}, Full{});
      base.value = _mm512_mask_mov_ps(base.value, far, _mm512_setzero_ps());
      const Vec scaled = load(state.sum + lane, Full{}) * exp2_or_zero(base - round_up(base));
      const Vec sum = where_less(base, broadcast(kLowest), broadcast(0.0f), scaled);
      store(state.sum + lane, sum, Full{});
      store(state.rounded_sum + lane, sum, Full{});
      store(state.base + lane, round_up(base), Full{});
    }
  }

  // Finishes the scores of a chunk. Calls scale(half, power), which is to multiply what has been made of earlier
  // weights, where the base changes.
  template <class Scale>
  [[gnu::always_inline]] void start(const KeyChunk& chunk, float* scores, bfloat16* weights, Scale&& scale) {
    scores_ = scores;
    weights_ = weights;
    next_[0] = next_[1] = 0;
    for (int half = 0; half < 2; ++half) {
      const Vec largest = finish_scores(chunk, half);
      Vec maximum = (largest - origin_[half]) * factor_;
      const __mmask16 far = far_lanes(largest, maximum, half);
      if (far != 0) {
        // What earlier weights are beside those of such a score. There are none where there was no base.
        const __mmask16 weighed = far & _mm512_cmp_ps_mask(base_[half].value, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
        const Vec earlier = exp2_or_zero(fma(origin_[half] - largest, factor_, base_[half]));
        const Vec near = {_mm512_maskz_mov_ps(~far, _mm512_set1_ps(1.0f))};
        const Vec power = {_mm512_mask_mov_ps(near.value, weighed, earlier.value)};
        scale_sums(half, power);
        scale(half, power);
        origin_[half].value = _mm512_mask_mov_ps(origin_[half].value, far, largest.value);
        base_[half].value = _mm512_mask_mov_ps(base_[half].value, far, _mm512_setzero_ps());
        maximum.value = _mm512_mask_mov_ps(maximum.value, far, _mm512_setzero_ps());
        shifted_ = true;
      }
      // How much larger than 1 a weight may be.
      const Vec limit = base_[half] + broadcast(kMostLog2);
      const __mmask16 beyond = _mm512_cmp_ps_mask(maximum.value, limit.value, _CMP_GT_OQ);
      if (beyond != 0) {
        const Vec old_base = base_[half];
        base_[half].value = _mm512_mask_mov_ps(old_base.value, beyond, round_up(maximum).value);
        const Vec power = {
            _mm512_mask_scalef_ps(_mm512_set1_ps(1.0f), beyond, _mm512_set1_ps(1.0f), (old_base - base_[half]).value)};
        scale_sums(half, power);
        scale(half, power);
      }
      negative_base_[half] = -where_less(base_[half], broadcast(kLowest), broadcast(0.0f), base_[half]);
    }
  }

  // Of the work for each half of the rows; a part is 2 keys.
  static constexpr int64_t kParts = kKeyChunk / 2;

  template <int kHalf>
  [[gnu::always_inline]] void do_part(std::integral_constant<int, kHalf>) {
    int64_t& part = next_[kHalf];
    if (part == kParts) return;
    const float* even_scores = scores_ + 2 * part * kAcceleratedRows + kHalf * kWidth;
    Vec even = load(even_scores, Full{});
    Vec odd = load(even_scores + kAcceleratedRows, Full{});
    if (__builtin_expect(shifted_, 0)) {
      even = even - origin_[kHalf];
      odd = odd - origin_[kHalf];
    }
    even = exp2_or_zero(fma(even, factor_, negative_base_[kHalf]));
    odd = exp2_or_zero(fma(odd, factor_, negative_base_[kHalf]));
    sum_[kHalf] = sum_[kHalf] + (even + odd);
    const __m512i pairs = pairs_of(even, odd);
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(kOne));
    rounded_sum_[kHalf].value = _mm512_dpbf16_ps(rounded_sum_[kHalf].value, reinterpret_cast<__m512bh>(pairs), ones);
    _mm512_store_si512(weights_ + kHalf * 512 + part * 32, pairs);
    ++part;
  }

  // Does what is left.
  void finish() {
    while (next_[0] < kParts) do_part(std::integral_constant<int, 0>());
    while (next_[1] < kParts) do_part(std::integral_constant<int, 1>());
  }

  void store_state(const TileState& state) const {
    for (int half = 0; half < 2; ++half) {
      store(state.origin + half * kWidth, origin_[half], Full{});
      store(state.base + half * kWidth, base_[half], Full{});
      store(state.sum + half * kWidth, sum_[half], Full{});
      store(state.rounded_sum + half * kWidth, rounded_sum_[half], Full{});
    }
  }

 private:
  static constexpr float kMostLog2 = 8;
  static constexpr int16_t kOne = 0x3f80;  // as bfloat16
  // Larger scores, in units of log 2, get an origin: up to here a product's rounding changes weights by less than 1 %.
  static constexpr float kFarLog2 = 65536;

  // Lanes whose largest score is the first one, or larger than the base, and far from the origin.
  __mmask16 far_lanes(Vec largest, Vec maximum, int half) const {
    const __mmask16 near = _mm512_cmp_ps_mask(abs(maximum).value, _mm512_set1_ps(kFarLog2), _CMP_LE_OQ);
    if (near == 0xffff) return 0;
    const __mmask16 finite = _mm512_cmp_ps_mask(abs(largest).value, _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
    const __mmask16 first = _mm512_cmp_ps_mask(base_[half].value, _mm512_set1_ps(kLowest), _CMP_LT_OQ);
    const __mmask16 larger = _mm512_cmp_ps_mask(maximum.value, base_[half].value, _CMP_GT_OQ);
    return finite & ~near & (first | larger);
  }

  void scale_sums(int half, Vec power) {
    sum_[half] = sum_[half] * power;
    rounded_sum_[half] = rounded_sum_[half] * power;
  }

  static Vec round_up(Vec x) { return {_mm512_roundscale_ps(x.value, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)}; }

  // Returns their maximum. What is excluded becomes -inf.
  [[gnu::always_inline]] Vec finish_scores(const KeyChunk& chunk, int half) {
    float* const scores = scores_ + half * kWidth;
    const float* const addends = memory_.addends + half * kWidth;
    if (chunk.some_excluded) {
      const __m512i kept = _mm512_load_si512(chunk.kept.of_row + half * kWidth);
      const auto exclude = [&](int64_t key, Vec score) -> Vec {
        const __mmask16 has_key = _mm512_test_epi32_mask(kept, _mm512_set1_epi32(1 << key));
        return {_mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), has_key, score.value)};
      };
      return finish_each(chunk, half, scores, addends, exclude);
    }
    if (scoring_.direct) return max_of_column(scores, kKeyChunk, kAcceleratedRows);
    return finish_each(chunk, half, scores, addends, [](int64_t, Vec score) { return score; });
  }

  // Finishes scores, the last step of which is change(key, score).
  template <class Change>
  [[gnu::always_inline]] Vec finish_each(const KeyChunk& chunk, int half, float* scores, const float* addends,
                                         Change&& change) {
    // Two, since each maximum waits for the one before it.
    Vec maxima[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
    const auto finish_by = [&](auto&& score_of) __attribute__((always_inline)) {
#pragma GCC unroll 32
      for (int64_t key = 0; key < kKeyChunk; ++key) {
        const int64_t place = key * kAcceleratedRows;
        const Vec score = change(key, score_of(key, load(scores + place, Full{})));
        store(scores + place, score, Full{});
        maxima[key % 2] = max(score, maxima[key % 2]);
      }
    };
    if (bias_rows_ != nullptr) {
      const TermPairs terms(*bias_rows_, half * kWidth, chunk.index * kKeyChunk, chunk.count);
      finish_by([&](int64_t key, Vec product)
                    __attribute__((always_inline)) { return fma(product, scoring_.scoring.scale, terms.of_key(key)); });
    } else if (scoring_.direct) {
      finish_by([](int64_t, Vec product) { return product; });
    } else if (added_ && chunk.addends == Addends::kSome) {
      finish_by([&](int64_t key, Vec product) {
        return fma(product, scoring_.scoring.scale, load(addends + key * kAcceleratedRows, Full{}));
      });
    } else {
      for (int64_t place = 0; place < kKeyChunk * kAcceleratedRows; place += kAcceleratedRows) {
        store(scores + place, scoring_.finish(load(scores + place, Full{}), chunk.addends, addends + place), Full{});
      }
      finish_by([](int64_t, Vec score) { return score; });
    }
    return max(maxima[0], maxima[1]);
  }

  const SoftmaxScoring& scoring_;
  const OperandRows* const bias_rows_;
  const bool added_;
  const TileMemory& memory_;
  const Vec factor_;
  float* scores_ = nullptr;
  bfloat16* weights_ = nullptr;
  int64_t next_[2] = {};  // parts that are done, of each half
  bool shifted_ = false;  // whether an origin is not 0
  Vec origin_[2];
  Vec base_[2];  // of scores less their origin, in units of log 2
  Vec negative_base_[2];
  Vec sum_[2];
  Vec rounded_sum_[2];
};

inline bool is_finite(float x) { return x - x == 0.0f; }

// output[column][lane] += weight * rows[column] for those elements of `count` rows that are not finite; where a weight
// is 0 nothing of its row shows. Weights are a step of a right operand.
[[gnu::noinline]] void add_infinite_elements(const bfloat16* rows, int64_t row_stride, int64_t count, int64_t dim,
                                             const bfloat16* weights, float* output) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < dim; ++i) {
      const float element = first_lane(load(rows + row * row_stride + i, Partial{1}));
      if (is_finite(element)) continue;
      for (int64_t lane = 0; lane < kAcceleratedRows; lane += kWidth) {
        const __m512i pair = _mm512_load_si512(weights + lane / kWidth * 512 + row / 2 * 32);
        const __m512i bits =
            row % 2 == 0 ? _mm512_slli_epi32(pair, 16) : _mm512_and_si512(pair, _mm512_set1_epi32(-65536));
        const __m512 weight = _mm512_castsi512_ps(bits);
        const __mmask16 taking_part = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        float* sums = output + i * kAcceleratedRows + lane;
        _mm512_store_ps(sums,
                        _mm512_mask3_fmadd_ps(weight, _mm512_set1_ps(element), _mm512_load_ps(sums), taking_part));
      }
    }
  }
}

// Adds the weighted values of a run to the next `count` blocks of 32 columns of the output, or sets them.
template <class Between>
[[gnu::always_inline]] inline void multiply_values(const PackedHead& head, Run& run, int64_t count, float* output,
                                                   bool add, Between&& between) {
  const AttentionProblem& problem = head.problem;
  const bfloat16* values = head.values + run.first * head.value_stride;
  for (; count > 0; --count, ++run.blocks) {
    const int64_t column = run.blocks * kPackedDim;
    Products::multiply(values + column * kKeyChunk, kKeyChunk, head.value_stride, run.weights, run.chunks, add,
                       output + column * kAcceleratedRows, between);
  }
  if (run.blocks * kPackedDim < problem.value_dim) return;
  for (int64_t i = 0; i < run.chunks; ++i) {
    if (head.values_finite[run.first + i] != 0) continue;
    const int64_t first = (run.first + i) * kKeyChunk;
    add_infinite_elements(head.value_rows + first * problem.value.row_stride, problem.value.row_stride,
                          smaller(kKeyChunk, problem.keys - first), problem.value_dim, run.weights + i * 1024, output);
  }
}

// Multiplies a run's weights of one vector of rows, by a power of 2 unless their origin changes.
inline void scale_weights(const Run& run, int half, Vec power) {
  for (int64_t i = 0; i < run.chunks * kKeyChunk / 2; ++i) {
    bfloat16* pairs = run.weights + i / 16 * 1024 + half * 512 + i % 16 * 32;
    const __m512i both = _mm512_load_si512(pairs);
    const Vec even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    const Vec odd = {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)))};
    _mm512_store_si512(pairs, pairs_of(even * power, odd * power));
  }
}

// The state of a tile before any keys.
void start_tile(const AttentionProblem& problem, const RowTile& tile, bool with_sinks, TileState& state) {
  pack_columns(RowPointers(problem.query, tile).rows, problem.head_dim, 2, state.queries);
  start_lanes(problem, tile, with_sinks, kLn2, kAcceleratedRows, {state.base, state.sum});
  Weighing::start_rows(SoftmaxScoring(problem), state);
  state.has_output = false;
}

// Attends from the rows of a tile to keys [first_key, last_key), a chunk of keys after the other. While a chunk's
// scores become weights, the products of the next one and of a part of the last run of values are computed.
[[gnu::noinline]] void attend(const PackedHead& head, const RowTile& tile, int64_t first_key, int64_t last_key,
                              bool products_finite, const TileMemory& memory, TileState& state) {
  const AttentionProblem& problem = head.problem;
  const SoftmaxScoring scoring(problem);
  const TileKeys tile_keys(problem, tile);
  const int64_t end = smaller(last_key, tile_keys.last());
  const int64_t steps = packed(problem.head_dim) / kPackedDim;
  const int64_t blocks = memory.value_dim / kPackedDim;
  const OperandRows mask_rows(problem.mask, 1, tile, kAcceleratedRows);
  const OperandRows bias_rows(problem.bias, bias_bytes(problem), tile, kAcceleratedRows);
  ComingBias coming_bias(problem, bias_rows, has_rows_of_keys(problem.bias, tile));
  const bool bias_from_rows = Weighing::adds(scoring, products_finite) && problem.bias_dtype == DType::kBFloat16 &&
                              has_rows_of_keys(problem.bias, tile);
  const auto find = [&](int64_t index, KeyChunk& chunk) {
    find_chunk(problem, mask_rows, bias_rows, tile, tile_keys, bias_from_rows, index, end, memory.addends, chunk);
  };
  const auto multiply_keys = [&](const KeyChunk& chunk, float* scores, auto&& between) __attribute__((always_inline)) {
    const Rows keys = head.keys_of_chunk(chunk.index);
    Products::multiply(keys.data, keys.stride, kPackedDim, state.queries, steps, false, scores, between);
  };
  const auto idle = [](auto) {};
  KeyChunk chunks[2];
  Run runs[2];
  for (int i = 0; i < 2; ++i) runs[i].weights = memory.weights[i];
  int turn = 0;     // of chunks
  int current = 0;  // run, which gets the weights
  bool has_output = state.has_output;
  const auto finish_run = [&](Run& run) {
    if (run.chunks == 0 || run.blocks == blocks) return;
    multiply_values(head, run, blocks - run.blocks, state.output, has_output, idle);
    has_output = true;
  };
  Weighing weighing(scoring, bias_from_rows ? &bias_rows : nullptr, products_finite, state, memory);
  find(larger(first_key, tile_keys.first()) / kKeyChunk, chunks[0]);
  if (chunks[0].exists) multiply_keys(chunks[0], memory.scores[0], idle);
  for (; chunks[turn].exists; turn = 1 - turn) {
    const KeyChunk& chunk = chunks[turn];
    KeyChunk& next = chunks[1 - turn];
    if (runs[current].chunks == kRunChunks || runs[current].first + runs[current].chunks != chunk.index) {
      finish_run(runs[1 - current]);
      current = 1 - current;
      runs[current].chunks = 0;
    }
    Run& run = runs[current];
    Run& complete = runs[1 - current];
    if (run.chunks == 0) {
      run.first = chunk.index;
      run.blocks = 0;
    }
    weighing.start(chunk, memory.scores[turn], run.weights + run.chunks * 1024, [&](int half, Vec power) {
      scale_weights(run, half, power);
      scale_weights(complete, half, power);
      if (!has_output && complete.blocks == 0) return;
      for (int64_t i = half * kWidth; i < memory.value_dim * kAcceleratedRows; i += kAcceleratedRows) {
        store(state.output + i, power * load(state.output + i, Full{}), Full{});
      }
    });
    find(chunk.index + 1, next);
    ++run.chunks;
    // Of the blocks of the complete run, as many as keep pace.
    const int64_t due = complete.chunks == 0 ? 0 : run.chunks * blocks / kRunChunks - complete.blocks;
    const int64_t pauses = Products::kPauses * ((next.exists ? steps : 0) + due * complete.chunks);
    const int64_t parts = ceil_div(Weighing::kParts, larger(pauses, 1));
    coming_bias.start((chunk.index + kBiasAhead + (bias_from_rows ? 0 : 1)) * kKeyChunk, kKeyChunk, pauses);
    const auto work = [&](auto half) __attribute__((always_inline)) {
      // The first apart: a loop, which most often runs once, takes registers from the tiles' addresses.
      weighing.do_part(half);
      for (int64_t part = 1; __builtin_expect(part < parts, 0); ++part) weighing.do_part(half);
      if constexpr (decltype(half)::value == 1) coming_bias.fetch_some();
    };
    if (next.exists) multiply_keys(next, memory.scores[1 - turn], work);
    if (due > 0) {
      multiply_values(head, complete, due, state.output, has_output, work);
      has_output |= complete.blocks == blocks;
    }
    weighing.finish();
    coming_bias.fetch_rest();
  }
  weighing.store_state(state);
  finish_run(runs[1 - current]);
  finish_run(runs[current]);
  state.has_output = has_output;
}

// The rows of the output of a tile, and what their weights are relative to.
void finish_tile(const AttentionProblem& problem, const TileState& state, const TileMemory& memory) {
  const int64_t value_dim = memory.value_dim;
  if (!state.has_output) clear(state.output, value_dim * kAcceleratedRows);
  transpose_rows(state.output, kAcceleratedRows, value_dim, kAcceleratedRows, memory.output_rows, value_dim);
  const Vec unit = broadcast(SoftmaxScoring(problem).unit);
  for (int64_t lane = 0; lane < kAcceleratedRows; lane += kWidth) {
    const Vec origin = load(state.origin + lane, Full{}) * unit;
    store(memory.maximum + lane, origin + load(state.base + lane, Full{}) * broadcast(kLn2), Full{});
  }
}

// Keys that few rows attend to at a time, and vectors of columns of their values that are summed together.
inline constexpr int64_t kFewKeys = 128;
inline constexpr int kFewVectors = 4;

// The memory of the few rows of a key head.
struct FewMemory {
  FewMemory(const AttentionProblem& problem, float* memory)
      : value_dim(round_up(problem.value_dim, kFewVectors * kWidth)) {
    Scratch scratch(memory);
    queries = as_bfloat16(scratch.take(packed(problem.head_dim) * kFewRows / 2));
    keys = as_bfloat16(scratch.take(kKeyChunk * packed(problem.head_dim) / 2));
    scores = scratch.take(kFewKeys * kFewRows);
    addends = scratch.take(kFewKeys * kFewRows);
    output = scratch.take(kFewRows * value_dim);
    maximum = scratch.take(kFewRows);
    sum = scratch.take(kFewRows);
    size = scratch.taken();
  }

  int64_t value_dim;
  bfloat16* queries;  // right operand
  bfloat16* keys;     // a copy of a chunk
  float* scores;      // [kFewKeys, kFewRows], then weights
  float* addends;
  float* output;  // [kFewRows, Dv]
  float* maximum;
  float* sum;
  int64_t size;
};

// Rows that will be needed soon, none by default. While keys are multiplied their values are fetched, and while values
// are added the next keys: the hardware foresees neither, and at the pace of the products neither waits for the other.
struct RowsAhead {
  RowsAhead() = default;
  // Rows [first, first + rows) of a head.
  RowsAhead(const HeadRows& source, const bfloat16* head, int64_t first, int64_t rows, int64_t row_dim)
      : data(head + first * source.row_stride), stride(source.row_stride), count(rows), dim(row_dim) {}

  // Inline, since compilers leave out calls of functions that do nothing but this.
  [[gnu::always_inline]] void fetch(int64_t row) const {
    constexpr int64_t kLine = 64 / sizeof(bfloat16);
    if (row >= count) return;
    for (int64_t i = 0; i < dim; i += kLine) __builtin_prefetch(data + row * stride + i, 0, 2);
  }

  const bfloat16* data = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
  int64_t dim = 0;
};

// The weights of several rows for each key: data[key * stride + row].
struct Weights {
  const float* data;
  int64_t stride;

  float of(int64_t key, int64_t row) const { return data[key * stride + row]; }
};

// Adds weighted values to kRows rows of the output, kVectors vectors of columns, of which the last has `last` lanes,
// and with each key fetches a row ahead. Returns false, and adds nothing, if a sum is not finite.
template <int kRows, int kVectors>
inline bool add_values(const bfloat16* values, int64_t row_stride, int64_t count, Weights weights, int64_t last,
                       const RowsAhead& ahead, float* output, int64_t stride) {
  Vec sums[kRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = broadcast(0.0f);
  }
  const auto add_key = [&](int64_t key, auto lanes) __attribute__((always_inline)) {
    ahead.fetch(key);
    Vec columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const bfloat16* source = values + key * row_stride + v * kWidth;
      if (v == kVectors - 1) {
        columns[v] = load(source, lanes);
      } else {
        columns[v] = load(source, Full{});
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = broadcast(weights.of(key, row));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fma(weight, columns[v], sums[row][v]);
    }
  };
  if (last == kWidth) {
    for (int64_t key = 0; key < count; ++key) add_key(key, Full{});
  } else {
    for (int64_t key = 0; key < count; ++key) add_key(key, Partial{static_cast<int>(last)});
  }
  Vec products = broadcast(0.0f);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) products = fma(sums[row][v], broadcast(0.0f), products);
  }
  if (reduce_add(products) != 0.0f) return false;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* place = output + row * stride + v * kWidth;
      store(place, load(place, Full{}) + sums[row][v], Full{});
    }
  }
  return true;
}

// The same sums for one row and any columns, where a weight of 0 takes nothing of its value.
[[gnu::noinline]] void add_selected_values(const bfloat16* values, int64_t row_stride, int64_t count, int64_t columns,
                                           Weights weights, float* output) {
  for_each_vector(columns, [&](int64_t i, auto lanes) {
    Vec sum = broadcast(0.0f);
    for (int64_t key = 0; key < count; ++key) {
      const float weight = weights.of(key, 0);
      if (weight != 0.0f) sum = fma(broadcast(weight), load(values + key * row_stride + i, lanes), sum);
    }
    store(output + i, load(output + i, lanes) + sum, lanes);
  });
}

// Adds weighted values to kRows rows of the output, which lie `stride` apart, up to kVectors vectors of columns.
template <int kRows, int kVectors>
inline void add_value_columns(const bfloat16* values, int64_t row_stride, int64_t count, int64_t columns,
                              Weights weights, const RowsAhead& ahead, float* output, int64_t stride) {
  constexpr int64_t kBefore = (kVectors - 1) * kWidth;  // the last vector
  if (columns <= kBefore) {
    for (int64_t i = 0; i < columns; i += kWidth) {
      add_value_columns<kRows, 1>(values + i, row_stride, count, smaller(kWidth, columns - i), weights,
                                  i == 0 ? ahead : RowsAhead(), output + i, stride);
    }
    return;
  }
  if (add_values<kRows, kVectors>(values, row_stride, count, weights, columns - kBefore, ahead, output, stride)) return;
  for (int row = 0; row < kRows; ++row) {
    add_selected_values(values, row_stride, count, columns, {weights.data + row, weights.stride},
                        output + row * stride);
  }
}

// Adds the weighted values of `count` keys to the rows of the output, and with each key fetches a row ahead.
inline void add_weighted_values(const AttentionProblem& problem, const bfloat16* values, int64_t count, int64_t rows,
                                Weights weights, RowsAhead ahead, const FewMemory& memory) {
  for (int64_t column = 0; column < problem.value_dim; column += kFewVectors * kWidth) {
    const int64_t columns = smaller(kFewVectors * kWidth, problem.value_dim - column);
    for (int64_t row = 0; row < rows;) {
      const bool four = row + 4 <= rows;
      const auto add = four ? add_value_columns<4, kFewVectors> : add_value_columns<1, kFewVectors>;
      add(values + column, problem.value.row_stride, count, columns, {weights.data + row, weights.stride}, ahead,
          memory.output + row * memory.value_dim + column, memory.value_dim);
      ahead = {};
      row += four ? 4 : 1;
    }
  }
}

// Attends from the few rows of a key head to keys [first_key, last_key), which are read where they lie.
void attend_few(const AttentionProblem& problem, const RowTile& tile, int64_t first_key, int64_t last_key,
                bool with_sinks, const FewMemory& memory) {
  const SoftmaxScoring scoring(problem);
  const TileKeys tile_keys(problem, tile);
  const int64_t rows = tile.rows();
  const int64_t steps = packed(problem.head_dim) / kPackedDim;
  const bfloat16* keys = rows_of<bfloat16>(problem.key, tile.batch, tile.key_head);
  const bfloat16* values = rows_of<bfloat16>(problem.value, tile.batch, tile.key_head);
  pack_columns(RowPointers(problem.query, tile).rows, problem.head_dim, 1, memory.queries);
  start_lanes(problem, tile, with_sinks, scoring.unit, kFewRows, {memory.maximum, memory.sum});
  clear(memory.output, kFewRows * memory.value_dim);
  const int64_t begin = larger(first_key, tile_keys.first() / kKeyChunk * kKeyChunk);
  const int64_t end = smaller(last_key, tile_keys.last());
  for (int64_t key = begin; key < end; key += kFewKeys) {
    const int64_t count = smaller(kFewKeys, end - key);
    const int64_t padded = round_up(count, kKeyChunk);
    const Addends addends = fill_addends(problem, tile, key, count, kFewRows, memory.addends);
    if (addends == Addends::kNothingLeft) continue;
    LaneKeys lane_keys;
    const bool partial = !tile_keys.all_have(key, key + padded);
    if (partial) fill_lane_keys(problem, tile, key, kFewRows, lane_keys);
    const RowsAhead values_ahead(problem.value, values, key, count, problem.value_dim);
    for (int64_t i = 0; i < padded; i += kKeyChunk) {
      const bfloat16* chunk = keys + (key + i) * problem.key.row_stride;
      int64_t stride = problem.key.row_stride;
      if (problem.keys - key - i < kKeyChunk || problem.head_dim % kPackedDim != 0) {
        copy_rows(chunk, stride, smaller(kKeyChunk, problem.keys - key - i), problem.head_dim, memory.keys);
        chunk = memory.keys;
        stride = packed(problem.head_dim);
      }
      for (int64_t row = i; row < i + kKeyChunk; ++row) values_ahead.fetch(row);
      Products::multiply_narrow(chunk, stride, kPackedDim, memory.queries, steps, memory.scores + i * kFewRows);
    }
    const bool changed = !scoring.direct || addends == Addends::kSome;
    if (changed || partial) {
      const Vec first = partial ? load(lane_keys.first, Full{}) : broadcast(0.0f);
      const Vec last = partial ? load(lane_keys.last, Full{}) : broadcast(0.0f);
      for (int64_t i = 0; i < padded; ++i) {
        float* place = memory.scores + i * kFewRows;
        Vec score = load(place, Full{});
        if (changed) score = scoring.finish(score, addends, memory.addends + i * kFewRows);
        if (partial) score = keep_in_range(score, i, first, last);
        store(place, score, Full{});
      }
    }
    const Vec correction = update_lanes(memory.scores, padded, kFewRows, scoring.factor, {memory.maximum, memory.sum},
                                        [&](int64_t i, Vec even, Vec odd) {
                                          store(memory.scores + i * kFewRows, even, Full{});
                                          store(memory.scores + (i + 1) * kFewRows, odd, Full{});
                                        });
    alignas(64) float corrections[kFewRows];
    store(corrections, correction, Full{});
    for (int64_t row = 0; row < rows; ++row) {
      if (corrections[row] == 1.0f) continue;
      float* sums = memory.output + row * memory.value_dim;
      for (int64_t i = 0; i < memory.value_dim; i += kWidth) {
        store(sums + i, broadcast(corrections[row]) * load(sums + i, Full{}), Full{});
      }
    }
    add_weighted_values(
        problem, values + key * problem.value.row_stride, count, rows, {memory.scores, kFewRows},
        RowsAhead(problem.key, keys, key + count, smaller(kFewKeys, end - key - count), problem.head_dim), memory);
  }
  finish_lanes(scoring.unit, kFewRows, {memory.maximum, memory.sum});
}

// products[i] = the product of row i of `count` rows with another one, which is 0 from `dim` on; written up to a
// multiple of 8. With each row fetches one ahead.
inline void multiply_rows(const bfloat16* rows, int64_t row_stride, int64_t count, int64_t dim, const bfloat16* other,
                          const RowsAhead& ahead, float* products) {
  constexpr int kRows = 8;
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t last = smaller(first + kRows, count) - 1;
    const bfloat16* starts[kRows];
    Vec sums[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      starts[i] = rows + smaller(first + i, last) * row_stride;
      sums[i] = broadcast(0.0f);
      ahead.fetch(first + i);
    }
    for (int64_t step = 0; step < dim; step += kPackedDim) {
      const auto factor = reinterpret_cast<__m512bh>(_mm512_load_si512(other + step));
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const auto elements = reinterpret_cast<__m512bh>(load_row(starts[i], step, dim));
        sums[i].value = _mm512_dpbf16_ps(sums[i].value, elements, factor);
      }
    }
    reduce_add_each(sums, products + first);
  }
}

// The same from a single row, which would leave matrix units empty: its scores have a lane for each key.
void attend_one(const AttentionProblem& problem, const RowTile& tile, int64_t first_key, int64_t last_key,
                bool with_sinks, const FewMemory& memory) {
  const SoftmaxScoring scoring(problem);
  const bfloat16* keys = rows_of<bfloat16>(problem.key, tile.batch, tile.key_head);
  const bfloat16* values = rows_of<bfloat16>(problem.value, tile.batch, tile.key_head);
  const bfloat16* query =
      rows_of<bfloat16>(problem.query, tile.batch, tile.head) + tile.query * problem.query.row_stride;
  for (int64_t i = 0; i < packed(problem.head_dim); i += kPackedDim) {
    _mm512_store_si512(memory.queries + i, load_row(query, i, problem.head_dim));
  }
  start_lanes(problem, tile, with_sinks, scoring.unit, 1, {memory.maximum, memory.sum});
  clear(memory.output, memory.value_dim);
  const KeyRange range = keys_of(problem, tile.query);
  const int64_t end = smaller(last_key, range.last);
  const bool with_addends = problem.mask.data != nullptr || problem.bias.data != nullptr;
  const Addends addends = with_addends ? Addends::kSome : Addends::kNone;
  for (int64_t key = larger(first_key, range.first); key < end; key += kFewKeys) {
    const int64_t count = smaller(kFewKeys, end - key);
    if (with_addends) {
      const Vec left = fill_addend_row(problem, tile.batch, tile.head, tile.query, key, count, memory.addends);
      if (reduce_max(left) == 0.0f) continue;
    }
    multiply_rows(keys + key * problem.key.row_stride, problem.key.row_stride, count, problem.head_dim, memory.queries,
                  RowsAhead(problem.value, values, key, count, problem.value_dim), memory.scores);
    Vec largest = broadcast(memory.maximum[0]);
    for_each_vector(count, [&](int64_t i, auto lanes) {
      const Vec finished = scoring.finish(load(memory.scores + i, Full{}), addends, memory.addends + i);
      const Vec score = keep(finished, lanes, broadcast(-kInfinity));
      store(memory.scores + i, score, Full{});
      largest = max(score, largest);
    });
    const float maximum = reduce_max(largest);
    const WeightOf weight_of(broadcast(maximum), scoring.factor);
    Vec sum = broadcast(0.0f);
    for (int64_t i = 0; i < count; i += kWidth) {
      const Vec weight = weight_of(load(memory.scores + i, Full{}));
      store(memory.scores + i, weight, Full{});
      sum = sum + weight;
    }
    const Vec correction = weight_of(broadcast(memory.maximum[0]));
    memory.sum[0] = memory.sum[0] * first_lane(correction) + reduce_add(sum);
    memory.maximum[0] = maximum;
    for (int64_t i = 0; i < memory.value_dim; i += kWidth) {
      store(memory.output + i, correction * load(memory.output + i, Full{}), Full{});
    }
    add_weighted_values(
        problem, values + key * problem.value.row_stride, count, 1, {memory.scores, 1},
        RowsAhead(problem.key, keys, key + count, smaller(kFewKeys, end - key - count), problem.head_dim), memory);
  }
  finish_lanes(scoring.unit, 1, {memory.maximum, memory.sum});
}

}  // namespace

int64_t attention_scratch(const AttentionProblem& problem) { return TileMemory(problem, nullptr).size; }

void attention_pack(const AttentionArgs& args, float*, int64_t begin, int64_t end) {
  const int64_t chunks = ceil_div(args.problem.keys, kKeyChunk);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t head = unit / chunks;
    pack_chunk(PackedHead(args, head / args.problem.key_heads, head % args.problem.key_heads), unit % chunks);
  }
}

void attention_tiles(const AttentionArgs& args, float* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  TileMemory memory(problem, scratch);
  const int64_t tiles = row_tiles_of(problem, kAcceleratedRows).count;
  const bool split = args.splits > 1;
  [[maybe_unused]] const Products::Session session;
  for (int64_t unit = begin; unit < end;) {
    const int64_t first_key = unit % args.splits * args.split_keys;
    const int64_t last_key = smaller(first_key + args.split_keys, problem.keys);
    const int64_t index = unit / args.splits;
    const int64_t batch = index / tiles / problem.key_heads;
    const int64_t key_head = index / tiles % problem.key_heads;
    const PackedHead head(args, batch, key_head);
    const auto tile_of = [&](int64_t i) {
      return row_tile(problem, kAcceleratedRows, batch, key_head, index % tiles + i);
    };
    // Splits have few keys.
    const int64_t together = split ? 1 : smaller(smaller(tiles_together(problem), end - unit), tiles - index % tiles);
    const int64_t part = together > 1 ? keys_of_part(problem) : last_key - first_key;
    for (int64_t i = 0; i < together; ++i) start_tile(problem, tile_of(i), !split, memory.tiles[i]);
    for (int64_t key = first_key; key < last_key; key += part) {
      for (int64_t i = 0; i < together; ++i) {
        attend(head, tile_of(i), key, smaller(key + part, last_key), true, memory, memory.tiles[i]);
      }
    }
    for (int64_t i = 0; i < together; ++i) {
      const RowTile tile = tile_of(i);
      TileState& state = memory.tiles[i];
      if (problem.bias.data != nullptr && !all_finite({state.sum, kAcceleratedRows}, 1, kAcceleratedRows)) {
        start_tile(problem, tile, !split, state);
        attend(head, tile, first_key, last_key, false, memory, state);
      }
      finish_tile(problem, state, memory);
      store_results<bfloat16>(args, tile, unit % args.splits, memory.output_rows, memory.value_dim, memory.maximum,
                              state.sum, state.rounded_sum);
    }
    unit += together;
  }
}

int64_t attention_few_scratch(const AttentionProblem& problem) { return FewMemory(problem, nullptr).size; }

void attention_few(const AttentionArgs& args, float* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  const FewMemory memory(problem, scratch);
  [[maybe_unused]] const Products::Session session;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t split = unit % args.splits;
    const int64_t head = unit / args.splits;
    const RowTile tile = row_tile(problem, kFewRows, head / problem.key_heads, head % problem.key_heads, 0);
    const auto attend_from = tile.rows() == 1 ? attend_one : attend_few;
    attend_from(problem, tile, split * args.split_keys, (split + 1) * args.split_keys, args.splits == 1, memory);
    // Weights are not rounded.
    store_results<bfloat16>(args, tile, split, memory.output, memory.value_dim, memory.maximum, memory.sum, memory.sum);
  }
}

}  // namespace rudnn::RUDNN_ISA
