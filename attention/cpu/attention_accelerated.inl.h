// Attention by products of bfloat16 pairs. Include after a struct Rows {data, stride} and a struct Products with
//
//   Session           what a thread must have while it multiplies
//   multiply          32 rows of a left operand by 32 columns of a right one
//   multiply_chunks   the same for several blocks of 32 rows, each with Rows of its own, and steps of 32 columns
//   multiply_narrow   32 rows by 16 columns
//
// of which all but the last can take a function that is called between products, for what else is to be done, and of
// operands as common/cpu/amx.h lays them out: tile (i, step) of a left operand is 16 i rows and `step` times
// step_stride from its start, and a right operand has, for each step, one tile for every 16 columns. Results are rows
// of float32.
//
// Scores are products of keys and queries, so that rows of keys are left operands as they lie in memory and the maximum
// over keys is taken across vectors. Two rows of weights make pairs for the product with the values, which are
// transposed once for all tiles of rows.
#include "cpu/attention_tiles.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

inline int64_t packed(int64_t dim) { return round_up(dim, kPackedDim); }

inline bfloat16* as_bfloat16(float* memory) { return reinterpret_cast<bfloat16*>(memory); }

// 2^x for x < 100 with a relative error of 4e-6; 0 below -100, so that no product is denormal; NaN for NaN.
inline Vec exp2_or_zero(Vec x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x.value, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const Vec shifted = x + broadcast(12582912.0f);
  const Vec r = x - (shifted - broadcast(12582912.0f));
  Vec series = broadcast(0.009782912637829407f);
  series = fma(series, r, broadcast(0.05597688363046096f));
  series = fma(series, r, broadcast(0.24020711076623094f));
  series = fma(series, r, broadcast(0.6931136044034354f));
  series = fma(series, r, broadcast(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.value), 23);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, _mm512_castps_si512(series.value), exponent))};
}

// Elements of two rows as pairs.
inline __m512i pairs_of(Vec even, Vec odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.value, even.value)));
}

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
  const Vec base = where_less(maximum, broadcast(kLowest), broadcast(0.0f), maximum * broadcast(factor));
  const Vec correction = exp2_or_zero(old_maximum * broadcast(factor) - base);
  Vec even_sum = broadcast(0.0f);
  Vec odd_sum = even_sum;
  for (int64_t key = 0; key < count; key += 2) {
    const Vec a = exp2_or_zero(fma(load(scores + key * width, Full{}), broadcast(factor), -base));
    const Vec b = exp2_or_zero(fma(load(scores + (key + 1) * width, Full{}), broadcast(factor), -base));
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

// Rows as a right operand of `halves` tiles to a step, whose columns they are; 0 in columns without a row.
inline void pack_columns(const bfloat16* const* rows, int64_t dim, int64_t halves, bfloat16* right) {
  for (int64_t half = 0; half < halves; ++half) {
    for (int64_t column = 0; column < dim; column += kPackedDim) {
      __m512i elements[16];
      for (int64_t i = 0; i < 16; ++i) {
        const bfloat16* row = rows[16 * half + i];
        elements[i] = row != nullptr ? load_row(row, column, dim) : _mm512_setzero_si512();
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
  if (chunk >= head.first_packed) {
    copy_rows(head.key_rows + key * problem.key.row_stride, problem.key.row_stride, count, problem.head_dim,
              head.packed_chunk(chunk));
  }
  head.values_finite[chunk] =
      transpose_chunk(head.value_rows + key * problem.value.row_stride, problem.value.row_stride, count,
                      problem.value_dim, head.values + chunk * head.value_stride);
}

// Keys of a tile.
inline constexpr int64_t kAcceleratedKeys = 256;

// The memory of a tile of rows. All but the queries have kAcceleratedRows lanes.
struct TileMemory {
  TileMemory(const AttentionProblem& problem, float* memory) : value_dim(packed(problem.value_dim)) {
    Scratch scratch(memory);
    queries = as_bfloat16(scratch.take(packed(problem.head_dim) * kAcceleratedRows / 2));
    for (auto& part : weights) part = as_bfloat16(scratch.take(kAcceleratedKeys * kAcceleratedRows / 2));
    for (auto& part : scores) part = scratch.take(kAcceleratedKeys * kAcceleratedRows);
    addends = scratch.take(kAcceleratedKeys * kAcceleratedRows);
    output = scratch.take(value_dim * kAcceleratedRows);
    output_rows = scratch.take(kAcceleratedRows * value_dim);
    maximum = scratch.take(kAcceleratedRows);
    sum = scratch.take(kAcceleratedRows);
    size = scratch.taken();
  }

  int64_t value_dim;
  bfloat16* queries;     // right operand
  bfloat16* weights[2];  // right operands of two tiles of keys, a step for each chunk
  float* scores[2];      // of two tiles of keys
  float* addends;
  float* output;       // [Dv, lanes]
  float* output_rows;  // [lanes, Dv]
  float* maximum;      // in units of log 2, or a little less
  float* sum;
  int64_t size;
};

// The bits of a where `keep` has them, else those of b.
inline __m512i choose_bits(__m512i keep, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(keep, a, b, 0xca); }

// Of words that exchange halves of their parts with others `distance` lanes away, the first ones keep the lower halves.
inline __m512i exchange_bits(__m512i words, __m512i partners, int distance, int lower_halves) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(distance));
  const __m512i keep = _mm512_mask_mov_epi32(_mm512_set1_epi32(lower_halves), second, _mm512_set1_epi32(~lower_halves));
  const __m512i turn = _mm512_mask_mov_epi32(_mm512_set1_epi32(distance), second, _mm512_set1_epi32(32 - distance));
  return choose_bits(keep, words, _mm512_rolv_epi32(partners, turn));
}

// Rows of bits become columns: bit r of word k is bit k of row r.
inline void transpose_bits(const uint32_t (&rows)[32], uint32_t* columns) {
  const __m512i first = _mm512_loadu_si512(rows);
  const __m512i second = _mm512_loadu_si512(rows + 16);
  const __m512i halves = _mm512_set1_epi32(0xffff);
  __m512i words[2] = {choose_bits(halves, first, _mm512_rol_epi32(second, 16)),
                      choose_bits(halves, _mm512_rol_epi32(first, 16), second)};
  for (int i = 0; i < 2; ++i) {
    __m512i w = words[i];
    w = exchange_bits(w, _mm512_shuffle_i64x2(w, w, 0x4e), 8, 0x00ff00ff);
    w = exchange_bits(w, _mm512_shuffle_i64x2(w, w, 0xb1), 4, 0x0f0f0f0f);
    w = exchange_bits(w, _mm512_shuffle_epi32(w, _MM_PERM_BADC), 2, 0x33333333);
    w = exchange_bits(w, _mm512_shuffle_epi32(w, _MM_PERM_CDAB), 1, 0x55555555);
    _mm512_storeu_si512(columns + 16 * i, w);
  }
}

// A bit for each row of a tile that has a key.
struct KeptBits {
  uint32_t of_key[kAcceleratedKeys];
};

// Bits of what the mask keeps of `count` keys. Returns whether it keeps any.
inline bool fill_kept_bits(const ScoreOperand& mask, const RowTile& tile, int64_t key, int64_t count, KeptBits& kept) {
  uint32_t any = 0;
  if (same_for_all_rows(mask, tile)) {
    const auto* source = operand_row<uint8_t>(mask, tile.batch, tile.head, tile.query, key);
    for (int64_t i = 0; i < count; ++i) {
      kept.of_key[i] = source[i * mask.key_stride] != 0 ? ~0u : 0u;
      any |= kept.of_key[i];
    }
    return any != 0;
  }
  uint32_t rows[kAcceleratedKeys / 32][32] = {};
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    const auto* source = operand_row<uint8_t>(mask, tile.batch, head, query, key);
    if (mask.key_stride != 1) {
      for (int64_t i = 0; i < count; ++i) {
        rows[i / 32][row] |= static_cast<uint32_t>(source[i * mask.key_stride] != 0) << i % 32;
      }
      return;
    }
    for (int64_t i = 0; i < count; i += 64) {
      const int64_t rest = count - i;
      const __mmask64 there = rest >= 64 ? ~__mmask64{0} : (__mmask64{1} << rest) - 1;
      const __m512i bytes = _mm512_maskz_loadu_epi8(there, source + i);
      const uint64_t bits = _mm512_test_epi8_mask(bytes, bytes);
      rows[i / 32][row] = static_cast<uint32_t>(bits);
      if (i / 32 + 1 < kAcceleratedKeys / 32) rows[i / 32 + 1][row] = static_cast<uint32_t>(bits >> 32);
    }
  });
  for (int64_t i = 0; i < count; i += 32) {
    for (uint32_t row : rows[i / 32]) any |= row;
    transpose_bits(rows[i / 32], kept.of_key + i);
  }
  return any != 0;
}

// Leaves of `chunks` chunks what the rows have by causality and the window.
inline void keep_bits_in_range(const AttentionProblem& problem, const RowTile& tile, const TileKeys& tile_keys,
                               int64_t key, int64_t chunks, KeptBits& kept) {
  LaneKeys lanes;
  fill_lane_keys(problem, tile, key, kAcceleratedRows, lanes);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = chunk * kKeyChunk;
    if (tile_keys.all_have(key + begin, key + begin + kKeyChunk)) continue;
    for (int64_t i = begin; i < begin + kKeyChunk; ++i) {
      const __m512 position = _mm512_set1_ps(static_cast<float>(i));
      uint32_t bits = 0;
      for (int half = 0; half < 2; ++half) {
        const __mmask16 from_first = _mm512_cmp_ps_mask(_mm512_load_ps(lanes.first + 16 * half), position, _CMP_LE_OQ);
        const __mmask16 in_range =
            _mm512_mask_cmp_ps_mask(from_first, position, _mm512_load_ps(lanes.last + 16 * half), _CMP_LT_OQ);
        bits |= static_cast<uint32_t>(in_range) << 16 * half;
      }
      kept.of_key[i] &= bits;
    }
  }
}

// Terms of the bias for the lanes of a tile, as fill_addends gives them, sixteen keys of sixteen rows at a time.
template <class T>
Addends fill_bias_terms(const ScoreOperand& bias, const RowTile& tile, int64_t key, int64_t count, float* terms) {
  const T* rows[kAcceleratedRows] = {};
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    rows[row] = operand_row<T>(bias, tile.batch, head, query, key);
  });
  __mmask16 left = 0;
  for (int64_t first_row = 0; first_row < kAcceleratedRows; first_row += kWidth) {
    for_each_vector(count, [&](int64_t i, auto lanes) {
      Vec block[kWidth];
      for (int row = 0; row < kWidth; ++row) {
        const T* source = rows[first_row + row];
        block[row] =
            source == nullptr ? broadcast(-kInfinity) : keep(load(source + i, lanes), lanes, broadcast(-kInfinity));
        left |= _mm512_cmp_ps_mask(block[row].value, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
      }
      transpose(block);
      for (int k = 0; k < kWidth; ++k) store(terms + (i + k) * kAcceleratedRows + first_row, block[k], Full{});
    });
  }
  return left != 0 ? Addends::kSome : Addends::kNothingLeft;
}

// The same for a bias of bfloat16, whose neighbouring keys stay pairs while rows become columns. Terms up to a whole
// chunk are written, 0 from `count` on.
inline Addends fill_paired_bias_terms(const ScoreOperand& bias, const RowTile& tile, int64_t key, int64_t count,
                                      float* terms) {
  const bfloat16* rows[kAcceleratedRows] = {};
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    rows[row] = operand_row<bfloat16>(bias, tile.batch, head, query, key);
  });
  const __m512i excluded = _mm512_set1_epi16(static_cast<int16_t>(0xff80));
  __mmask16 left = 0;
  for (int64_t first_row = 0; first_row < kAcceleratedRows; first_row += kWidth) {
    for (int64_t i = 0; i < count; i += kKeyChunk) {
      __m512i pairs[16];
      for (int row = 0; row < 16; ++row) {
        const bfloat16* source = rows[first_row + row];
        pairs[row] = source == nullptr ? excluded : load_row(source, i, count);
      }
      transpose(pairs);
      float* columns = terms + i * kAcceleratedRows + first_row;
      for (int k = 0; k < 16; ++k) {
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[k], 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs[k], _mm512_set1_epi32(-65536)));
        left |= _mm512_cmp_ps_mask(even, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
        left |= _mm512_cmp_ps_mask(odd, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
        _mm512_store_ps(columns + 2 * k * kAcceleratedRows, even);
        _mm512_store_ps(columns + (2 * k + 1) * kAcceleratedRows, odd);
      }
    }
  }
  return left != 0 ? Addends::kSome : Addends::kNothingLeft;
}

inline Addends fill_bias_addends(const AttentionProblem& problem, const RowTile& tile, int64_t key, int64_t count,
                                 float* addends) {
  const ScoreOperand& bias = problem.bias;
  if (bias.data != nullptr && bias.key_stride == 1 && !same_for_all_rows(bias, tile)) {
    if (problem.bias_dtype == DType::kBFloat16) return fill_paired_bias_terms(bias, tile, key, count, addends);
    Addends filled = Addends::kNone;
    visit_dtype(problem.bias_dtype, [&](auto element) {
      filled = fill_bias_terms<typename decltype(element)::type>(bias, tile, key, count, addends);
    });
    return filled;
  }
  AttentionProblem without_mask = problem;
  without_mask.mask.data = nullptr;
  return fill_addends(without_mask, tile, key, count, kAcceleratedRows, addends);
}

// A tile of keys that a tile of rows attends to.
struct KeyTile {
  int64_t key = 0;
  int64_t chunks = 0;  // 0 if there is none
  Addends addends = Addends::kNone;
  bool some_excluded = false;  // those without a bit
  KeptBits kept;
};

// The tile of keys from `key` to `end` at most, or the next one in which something takes part.
inline void next_key_tile(const AttentionProblem& problem, const RowTile& tile, const TileKeys& tile_keys, int64_t key,
                          int64_t end, float* addends, KeyTile& next) {
  for (; key < end; key += kAcceleratedKeys) {
    const int64_t count = smaller(kAcceleratedKeys, end - key);
    next.key = key;
    next.chunks = ceil_div(count, kKeyChunk);
    next.addends = fill_bias_addends(problem, tile, key, count, addends);
    if (next.addends == Addends::kNothingLeft) continue;
    const bool partial = !tile_keys.all_have(key, key + next.chunks * kKeyChunk);
    next.some_excluded = partial || problem.mask.data != nullptr;
    if (problem.mask.data != nullptr) {
      if (!fill_kept_bits(problem.mask, tile, key, count, next.kept)) continue;
    } else if (partial) {
      for (uint32_t& bits : next.kept.of_key) bits = ~0u;
    }
    if (partial) keep_bits_in_range(problem, tile, tile_keys, key, next.chunks, next.kept);
    return;
  }
  next.chunks = 0;
}

// Scores of a tile become weights of one vector of rows after the other and of two keys at a time, while products run.
class Weighing {
 public:
  Weighing(const SoftmaxScoring& scoring, const TileMemory& memory) : scoring_(scoring), memory_(memory) {}

  // Finishes scores of a tile of keys and finds their maximum.
  void start(const KeyTile& tile, float* scores, bfloat16* weights) {
    scores_ = scores;
    weights_ = weights;
    next_ = 0;
    count_ = tile.chunks * kKeyChunk;
    for (int half = 0; half < 2; ++half) {
      float* const bases = memory_.maximum + half * kWidth;
      const Vec old_base = load(bases, Full{});
      const Vec maximum = finish_scores(tile, half) * broadcast(scoring_.factor);
      const Vec base = max(maximum, old_base);
      const Vec finite_base = where_less(base, broadcast(kLowest), broadcast(0.0f), base);
      negative_base_[half] = -finite_base;
      correction_[half] = exp2_or_zero(old_base - finite_base);
      store(bases, base, Full{});
      sum_[half] = broadcast(0.0f);
    }
  }

  // The parts of the work: 2 keys of all rows.
  int64_t parts() const { return count_ / 2; }

  [[gnu::always_inline]] void do_part() {
    if (next_ >= count_) return;
    const Vec factor = broadcast(scoring_.factor);
    const float* scores = scores_ + next_ * kAcceleratedRows;
    bfloat16* pairs = weights_ + next_ / kKeyChunk * 1024 + next_ % kKeyChunk / 2 * 32;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const float* even_scores = scores + half * kWidth;
      const Vec even = exp2_or_zero(fma(load(even_scores, Full{}), factor, negative_base_[half]));
      const Vec odd = exp2_or_zero(fma(load(even_scores + kAcceleratedRows, Full{}), factor, negative_base_[half]));
      sum_[half] = sum_[half] + (even + odd);
      _mm512_store_si512(pairs + half * 512, pairs_of(even, odd));
    }
    next_ += 2;
  }

  // Does what is left, and corrects what the rows have so far.
  void finish(bool has_output) {
    while (next_ < count_) do_part();
    for (int half = 0; half < 2; ++half) {
      float* sums = memory_.sum + half * kWidth;
      store(sums, fma(load(sums, Full{}), correction_[half], sum_[half]), Full{});
      if (!has_output || _mm512_cmpneq_ps_mask(correction_[half].value, _mm512_set1_ps(1.0f)) == 0) continue;
      for (int64_t i = 0; i < memory_.value_dim; ++i) {
        float* output = memory_.output + i * kAcceleratedRows + half * kWidth;
        store(output, correction_[half] * load(output, Full{}), Full{});
      }
    }
  }

 private:
  Vec finish_scores(const KeyTile& tile, int half) {
    Vec maximum = broadcast(-kInfinity);
    if (!scoring_.direct) return maximum_of<true>(tile, half, maximum);
    if (tile.some_excluded) return maximum_of<false>(tile, half, maximum);
    return max_of_column(scores_ + half * kWidth, count_, kAcceleratedRows);
  }

  template <bool kChanged>
  Vec maximum_of(const KeyTile& tile, int half, Vec maximum) {
    for (int64_t key = 0; key < count_; ++key) {
      const int64_t i = key * kAcceleratedRows + half * kWidth;
      Vec score = load(scores_ + i, Full{});
      if (kChanged) score = scoring_.finish(score, tile.addends, memory_.addends + i);
      if (!kChanged || tile.some_excluded) {
        const auto kept = static_cast<__mmask16>(tile.kept.of_key[key] >> 16 * half);
        score.value = _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), kept, score.value);
      }
      store(scores_ + i, score, Full{});
      maximum = max(score, maximum);
    }
    return maximum;
  }

  const SoftmaxScoring& scoring_;
  const TileMemory& memory_;
  float* scores_ = nullptr;
  bfloat16* weights_ = nullptr;
  int64_t next_ = 0;
  int64_t count_ = 0;
  Vec negative_base_[2];
  Vec correction_[2];
  Vec sum_[2];
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

template <class Between>
inline void multiply_keys(const PackedHead& head, const KeyTile& tile, const TileMemory& memory, float* scores,
                          Between&& between) {
  Rows keys[kAcceleratedKeys / kKeyChunk];
  for (int64_t chunk = 0; chunk < tile.chunks; ++chunk) keys[chunk] = head.keys_of_chunk(tile.key / kKeyChunk + chunk);
  Products::multiply_chunks(keys, tile.chunks, memory.queries, packed(head.problem.head_dim) / kPackedDim, scores,
                            between);
}

// Adds the weighted values of a tile to the output, or sets it.
template <class Between>
inline void multiply_values(const PackedHead& head, int64_t key, int64_t chunks, const bfloat16* weights, bool add,
                            const TileMemory& memory, Between&& between) {
  const AttentionProblem& problem = head.problem;
  const int64_t first_chunk = key / kKeyChunk;
  for (int64_t i = 0; i < memory.value_dim; i += kPackedDim) {
    Products::multiply(head.values + first_chunk * head.value_stride + i * kKeyChunk, kKeyChunk, head.value_stride,
                       weights, chunks, add, memory.output + i * kAcceleratedRows, between);
  }
  for (int64_t i = 0; i < chunks; ++i) {
    if (head.values_finite[first_chunk + i] != 0) continue;
    const int64_t first = key + i * kKeyChunk;
    add_infinite_elements(head.value_rows + first * problem.value.row_stride, problem.value.row_stride,
                          smaller(kKeyChunk, problem.keys - first), problem.value_dim, weights + i * 1024,
                          memory.output);
  }
}

// Attends from the rows of a tile to keys [first_key, last_key). While the products of the next tile of keys and of the
// values of the last one run, scores become weights.
void attend(const PackedHead& head, const RowTile& tile, int64_t first_key, int64_t last_key, bool with_sinks,
            const TileMemory& memory) {
  const AttentionProblem& problem = head.problem;
  const SoftmaxScoring scoring(problem);
  const TileKeys tile_keys(problem, tile);
  pack_columns(RowPointers(problem.query, tile).rows, problem.head_dim, 2, memory.queries);
  start_lanes(problem, tile, with_sinks, kLn2, kAcceleratedRows, {memory.maximum, memory.sum});
  const int64_t begin = larger(first_key, tile_keys.first() / kKeyChunk * kKeyChunk);
  const int64_t end = smaller(last_key, tile_keys.last());
  const auto find = [&](int64_t key, KeyTile& next) {
    next_key_tile(problem, tile, tile_keys, key, end, memory.addends, next);
  };
  const int64_t steps = packed(problem.head_dim) / kPackedDim;
  KeyTile tiles[2];
  int64_t last_tile_key = 0;  // of the tile whose values are still to be added
  int64_t last_chunks = 0;
  bool has_output = false;
  int turn = 0;
  find(begin, tiles[0]);
  multiply_keys(head, tiles[0], memory, memory.scores[0], [] {});
  Weighing weighing(scoring, memory);
  while (tiles[turn].chunks > 0) {
    const KeyTile& current = tiles[turn];
    KeyTile& next = tiles[1 - turn];
    weighing.start(current, memory.scores[turn], memory.weights[turn]);
    find(current.key + current.chunks * kKeyChunk, next);
    const int64_t products = next.chunks * steps + last_chunks * memory.value_dim / kPackedDim;
    const int64_t parts = products == 0 ? 0 : ceil_div(weighing.parts(), products);
    const auto work = [&]() __attribute__((always_inline)) {
      for (int64_t part = 0; part < parts; ++part) weighing.do_part();
    };
    multiply_keys(head, next, memory, memory.scores[1 - turn], work);
    if (last_chunks > 0) {
      multiply_values(head, last_tile_key, last_chunks, memory.weights[1 - turn], has_output, memory, work);
      has_output = true;
    }
    weighing.finish(has_output);
    last_tile_key = current.key;
    last_chunks = current.chunks;
    turn = 1 - turn;
  }
  if (last_chunks > 0) {
    multiply_values(head, last_tile_key, last_chunks, memory.weights[1 - turn], has_output, memory, [] {});
  } else {
    clear(memory.output, memory.value_dim * kAcceleratedRows);
  }
  finish_lanes(kLn2, kAcceleratedRows, {memory.maximum, memory.sum});
  transpose_rows(memory.output, kAcceleratedRows, memory.value_dim, kAcceleratedRows, memory.output_rows,
                 memory.value_dim);
}

// The memory of the few rows of a key head.
inline constexpr int64_t kFewKeys = 128;

struct FewMemory {
  FewMemory(const AttentionProblem& problem, float* memory) : value_dim(round_up(problem.value_dim, kFewColumns)) {
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

  // Columns of values that are summed at a time.
  static constexpr int64_t kFewColumns = 64;

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

inline void prefetch_row(const bfloat16* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 32) __builtin_prefetch(row + i);
}

// Adds weighted values to kRows rows of the output, kVectors vectors of columns, of which the last has `last` lanes. As
// many keys further on, what will be needed soon is fetched. Returns false, and adds nothing, if a sum is not finite.
template <int kRows, int kVectors>
inline bool add_values(const bfloat16* values, int64_t row_stride, int64_t count, const float* weights, int64_t last,
                       float* output, int64_t stride) {
  Vec sums[kRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = broadcast(0.0f);
  }
  const auto add_key = [&](int64_t key, auto lanes) __attribute__((always_inline)) {
    Vec columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const bfloat16* source = values + key * row_stride + v * kWidth;
      if (v % 2 == 0) __builtin_prefetch(source + count * row_stride);
      if (v == kVectors - 1) {
        columns[v] = load(source, lanes);
      } else {
        columns[v] = load(source, Full{});
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = broadcast(weights[key * kFewRows + row]);
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
                                           const float* weights, float* output) {
  for_each_vector(columns, [&](int64_t i, auto lanes) {
    Vec sum = broadcast(0.0f);
    for (int64_t key = 0; key < count; ++key) {
      const float weight = weights[key * kFewRows];
      if (weight != 0.0f) sum = fma(broadcast(weight), load(values + key * row_stride + i, lanes), sum);
    }
    store(output + i, load(output + i, lanes) + sum, lanes);
  });
}

template <int kRows, int kVectors>
inline void add_value_columns(const AttentionProblem& problem, const bfloat16* values, int64_t count, int64_t column,
                              int64_t row, const FewMemory& memory) {
  const int64_t columns = smaller(kVectors * kWidth, problem.value_dim - column);
  const float* weights = memory.scores + row;
  float* output = memory.output + row * memory.value_dim + column;
  const int64_t stride = problem.value.row_stride;
  const auto selected = [&](int rows) {
    for (int i = 0; i < rows; ++i) {
      add_selected_values(values + column, stride, count, columns, weights + i, output + i * memory.value_dim);
    }
  };
  if (columns > (kVectors - 1) * kWidth) {
    if (!add_values<kRows, kVectors>(values + column, stride, count, weights, columns - (kVectors - 1) * kWidth, output,
                                     memory.value_dim)) {
      selected(kRows);
    }
    return;
  }
  for (int64_t i = 0; i < columns; i += kWidth) {
    if (!add_values<kRows, 1>(values + column + i, stride, count, weights, smaller(kWidth, columns - i), output + i,
                              memory.value_dim)) {
      for (int r = 0; r < kRows; ++r) {
        add_selected_values(values + column + i, stride, count, smaller(kWidth, columns - i), weights + r,
                            output + r * memory.value_dim + i);
      }
    }
  }
}

inline void add_weighted_values(const AttentionProblem& problem, const bfloat16* values, int64_t count, int64_t rows,
                                const FewMemory& memory) {
  for (int64_t column = 0; column < problem.value_dim; column += FewMemory::kFewColumns) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) add_value_columns<4, 4>(problem, values, count, column, row, memory);
    for (; row < rows; ++row) add_value_columns<1, 4>(problem, values, count, column, row, memory);
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
    const int64_t next = smaller(kFewKeys, end - key - count);  // keys of the next tile
    for (int64_t i = 0; i < padded; i += kKeyChunk) {
      const bfloat16* chunk = keys + (key + i) * problem.key.row_stride;
      int64_t stride = problem.key.row_stride;
      if (problem.keys - key - i < kKeyChunk || problem.head_dim % kPackedDim != 0) {
        copy_rows(chunk, stride, smaller(kKeyChunk, problem.keys - key - i), problem.head_dim, memory.keys);
        chunk = memory.keys;
        stride = packed(problem.head_dim);
      }
      for (int64_t row = i; row < smaller(i + kKeyChunk, next); ++row) {
        prefetch_row(keys + (key + count + row) * problem.key.row_stride, problem.head_dim);
      }
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
    add_weighted_values(problem, values + key * problem.value.row_stride, count, rows, memory);
  }
  finish_lanes(scoring.unit, kFewRows, {memory.maximum, memory.sum});
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
  const TileMemory memory(problem, scratch);
  const int64_t tiles = row_tiles_of(problem, kAcceleratedRows).count;
  [[maybe_unused]] const Products::Session session;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t split = unit % args.splits;
    const int64_t index = unit / args.splits;
    const int64_t batch = index / tiles / problem.key_heads;
    const int64_t key_head = index / tiles % problem.key_heads;
    const RowTile tile = row_tile(problem, kAcceleratedRows, batch, key_head, index % tiles);
    attend(PackedHead(args, batch, key_head), tile, split * args.split_keys, (split + 1) * args.split_keys,
           args.splits == 1, memory);
    store_results<bfloat16>(args, tile, split, memory.output_rows, memory.value_dim, memory.maximum, memory.sum);
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
    attend_few(problem, tile, split * args.split_keys, (split + 1) * args.split_keys, args.splits == 1, memory);
    store_results<bfloat16>(args, tile, split, memory.output, memory.value_dim, memory.maximum, memory.sum);
  }
}

}  // namespace rudnn::RUDNN_ISA
