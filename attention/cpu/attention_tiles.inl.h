// What the tiles of the forward and of the backward have in common, for any vector width: which rows and keys they
// hold, what is added to their scores, and their products in float32. A tile of scores has a row for each key and a
// lane for each row of queries.
#pragma once

#include "cpu/attention.h"

namespace rudnn::RUDNN_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline constexpr float kInfinity = __builtin_inff();
// Less than this is -inf alone.
inline constexpr float kLowest = -3.402823466e+38f;
inline constexpr float kLeastNormal = 1.17549435e-38f;

// Rows of a product that are computed together. Rows of results and of left operands are there up to a multiple of it.
inline constexpr int kProductRows = kWidth == 16 ? 8 : 4;

// Hands out parts of the scratch memory, or without any counts them.
class Scratch {
 public:
  explicit Scratch(float* memory) : memory_(memory) {}

  float* take(int64_t count) {
    constexpr int64_t kLine = 16;
    float* part = memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += round_up(count, kLine);
    return part;
  }
  int64_t taken() const { return taken_; }

 private:
  float* memory_;
  int64_t taken_ = 0;
};

// Rows of queries that share a key head: `queries` rows of each of `heads` heads, head after head.
struct RowTile {
  int64_t batch;
  int64_t key_head;
  int64_t head;
  int64_t heads;
  int64_t query;
  int64_t queries;

  int64_t rows() const { return heads * queries; }
};

// Calls body(row, head, query) for the rows of a tile.
template <class Body>
inline void for_each_row(const RowTile& tile, Body&& body) {
  int64_t row = 0;
  for (int64_t head = tile.head; head < tile.head + tile.heads; ++head) {
    for (int64_t query = tile.query; query < tile.query + tile.queries; ++query) body(row++, head, query);
  }
}

// With causality the last tiles of a head have the most keys. Taken from both ends by turns, neighbours have as many
// keys as any others.
inline int64_t alternate(int64_t index, int64_t count) { return index % 2 == 0 ? index / 2 : count - 1 - index / 2; }

inline RowTile row_tile(const AttentionProblem& problem, int64_t tile_rows, int64_t batch, int64_t key_head,
                        int64_t index) {
  const RowTiles tiles = row_tiles_of(problem, tile_rows);
  const int64_t group = problem.heads / problem.key_heads;
  const int64_t head = index / tiles.tiles_per_head * tiles.heads_per_tile;
  const int64_t query = alternate(index % tiles.tiles_per_head, tiles.tiles_per_head) * tile_rows;
  return {batch,
          key_head,
          key_head * group + head,
          smaller(tiles.heads_per_tile, group - head),
          query,
          smaller(tile_rows, problem.queries - query)};
}

struct KeyRange {
  int64_t first;
  int64_t last;
};

// The keys that causality and the window leave to a query.
inline KeyRange keys_of(const AttentionProblem& problem, int64_t query) {
  const int64_t position = query + problem.keys - problem.queries;
  const int64_t first = larger(position - problem.keys_before, 0);
  return {first, larger(smaller(position + problem.keys_after + 1, problem.keys), first)};
}

// The same for the rows of a tile. Later queries have later keys, so the first and the last one tell what all have.
struct TileKeys {
  TileKeys(const AttentionProblem& problem, const RowTile& tile)
      : earliest(keys_of(problem, tile.query)), latest(keys_of(problem, tile.query + tile.queries - 1)) {}

  int64_t first() const { return smaller(earliest.first, latest.first); }
  int64_t last() const { return latest.last; }
  // Whether every row has all keys [begin, end).
  bool all_have(int64_t begin, int64_t end) const { return latest.first <= begin && end <= earliest.last; }
  bool some_have(int64_t begin, int64_t end) const { return first() < end && begin < last(); }

  KeyRange earliest;
  KeyRange latest;
};

// The keys that each lane has, counted from the start of a tile of keys. Lanes beyond the rows have none.
struct LaneKeys {
  alignas(64) float first[kMaxRowTile];
  alignas(64) float last[kMaxRowTile];
};

inline void fill_lane_keys(const AttentionProblem& problem, const RowTile& tile, int64_t key, int64_t width,
                           LaneKeys& lanes) {
  for (int64_t lane = 0; lane < width; ++lane) lanes.first[lane] = lanes.last[lane] = 0;
  const auto relative = [&](int64_t position) {
    return static_cast<float>(larger(smaller(position - key, kMaxKeyTile), 0));
  };
  for_each_row(tile, [&](int64_t row, int64_t, int64_t query) {
    const KeyRange range = keys_of(problem, query);
    lanes.first[row] = relative(range.first);
    lanes.last[row] = relative(range.last);
  });
}

// Where the rows of a head begin.
template <class T>
inline const T* rows_of(const HeadRows& rows, int64_t batch, int64_t head) {
  return static_cast<const T*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride;
}

// `count` rows, widened, with 0 up to a multiple of the vector width.
template <class T>
inline void widen_rows(const T* rows, int64_t row_stride, int64_t count, int64_t dim, float* widened, int64_t stride) {
  for (int64_t row = 0; row < count; ++row) {
    for_each_vector(dim, [&](int64_t i, auto lanes) {
      store(widened + row * stride + i, load(rows + row * row_stride + i, lanes), Full{});
    });
  }
}

// Rows of whole vectors.
struct FloatRows {
  const float* data;
  int64_t stride;
};

// Whether all elements are finite.
inline bool all_finite(FloatRows rows, int64_t count, int64_t dim) {
  // As many as the latency of a sum needs.
  constexpr int kSums = 4;
  Vec sums[kSums];
  for (auto& sum : sums) sum = broadcast(0.0f);
  const auto add = [&](const float* vector, Vec& sum) { sum = fma(load(vector, Full{}), broadcast(0.0f), sum); };
  for (int64_t row = 0; row < count; ++row) {
    const float* data = rows.data + row * rows.stride;
    int64_t i = 0;
    for (; i + kSums * kWidth <= dim; i += kSums * kWidth) {
#pragma GCC unroll 4
      for (int k = 0; k < kSums; ++k) add(data + i + k * kWidth, sums[k]);
    }
    for (; i < dim; i += kWidth) add(data + i, sums[0]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) == 0.0f;
}

// The rows, if they are in float32 already, else null.
inline const float* if_floats(const float* rows) { return rows; }
template <class T>
inline const float* if_floats(const T*) {
  return nullptr;
}

// Rows of keys or values in float32, as many as a product reads: where they lie, or a copy. Rows that lie far apart
// fall into few sets of the cache and are copied too.
template <class T>
inline FloatRows float_rows(const T* rows, int64_t row_stride, int64_t count, int64_t dim, float* copy,
                            int64_t copy_stride) {
  const float* floats = if_floats(rows);
  if (floats != nullptr && row_stride == dim && dim % kWidth == 0 && count % kProductRows == 0) return {floats, dim};
  widen_rows(rows, row_stride, count, dim, copy, copy_stride);
  return {copy, copy_stride};
}

// transposed[column][row] of the rows of a matrix with whole vectors; rows up to a multiple of the vector width must be
// there, and become lanes.
inline void transpose_rows(const float* rows, int64_t stride, int64_t row_count, int64_t columns, float* transposed,
                           int64_t width) {
  for (int64_t row = 0; row < row_count; row += kWidth) {
    for (int64_t column = 0; column < columns; column += kWidth) {
      Vec block[kWidth];
      for (int i = 0; i < kWidth; ++i) block[i] = load(rows + (row + i) * stride + column, Full{});
      transpose(block);
      for (int i = 0; i < kWidth; ++i) store(transposed + (column + i) * width + row, block[i], Full{});
    }
  }
}

inline void clear(float* data, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) store(data + i, broadcast(0.0f), Full{});
}

// Rows of a tile, widened, and as columns, with 0 in lanes without a row.
template <class T>
inline void load_columns(const HeadRows& source, const RowTile& tile, int64_t head_dim, int64_t dim, int64_t width,
                         float* rows, float* transposed) {
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    widen_rows(rows_of<T>(source, tile.batch, head) + query * source.row_stride, 0, 1, head_dim, rows + row * dim, dim);
  });
  clear(rows + tile.rows() * dim, (width - tile.rows()) * dim);
  transpose_rows(rows, dim, width, dim, transposed, width);
}

// What mask and bias add to the scores of a tile: -inf for what they exclude.
enum class Addends { kNone, kSome, kNothingLeft };

template <class T>
inline const T* operand_row(const ScoreOperand& operand, int64_t batch, int64_t head, int64_t query, int64_t key) {
  return static_cast<const T*>(operand.data) + batch * operand.batch_stride + head * operand.head_stride +
         query * operand.query_stride + key * operand.key_stride;
}

// Addends of one row for `count` keys, with -inf up to a multiple of the vector width. Returns in each lane whether any
// key is left.
inline Vec fill_addend_row(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t query, int64_t key,
                           int64_t count, float* row) {
  const ScoreOperand& bias = problem.bias;
  const ScoreOperand& mask = problem.mask;
  Vec left = broadcast(0.0f);
  const auto see_left = [&](Vec addends) {
    left = max(where_less(addends, broadcast(kLowest), broadcast(0.0f), broadcast(1.0f)), left);
  };
  if (bias.data == nullptr) {
    for (int64_t i = 0; i < count; ++i) row[i] = 0;
  } else {
    visit_dtype(problem.bias_dtype, [&](auto element) {
      using T = typename decltype(element)::type;
      const T* source = operand_row<T>(bias, batch, head, query, key);
      if (bias.key_stride == 1) {
        for_each_vector(count, [&](int64_t i, auto lanes) {
          // The row's part in the next tile: rows are too far apart for the hardware to foresee it.
          __builtin_prefetch(source + count + i, 0, 2);
          const Vec addends = keep(load(source + i, lanes), lanes, broadcast(-kInfinity));
          store(row + i, addends, Full{});
          see_left(addends);
        });
      } else {
        for (int64_t i = 0; i < count; ++i) store(row + i, load(source + i * bias.key_stride, Partial{1}), Partial{1});
      }
    });
    if (mask.data == nullptr && bias.key_stride == 1) return left;
  }
  if (mask.data != nullptr) {
    const auto* source = operand_row<uint8_t>(mask, batch, head, query, key);
    if (mask.key_stride == 1) {
      for (int64_t i = 0; i < count; ++i) row[i] = source[i] != 0 ? row[i] : -kInfinity;
    } else {
      for (int64_t i = 0; i < count; ++i) row[i] = source[i * mask.key_stride] != 0 ? row[i] : -kInfinity;
    }
  }
  for (int64_t i = count; i % kWidth != 0; ++i) row[i] = -kInfinity;
  left = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += kWidth) see_left(load(row + i, Full{}));
  return left;
}

inline bool same_for_all_rows(const ScoreOperand& operand, const RowTile& tile) {
  return operand.data == nullptr ||
         ((operand.query_stride == 0 || tile.queries == 1) && (operand.head_stride == 0 || tile.heads == 1));
}

// Whether an operand has rows that differ, and in which keys are neighbours.
inline bool has_rows_of_keys(const ScoreOperand& operand, const RowTile& tile) {
  return operand.data != nullptr && operand.key_stride == 1 && !same_for_all_rows(operand, tile);
}

// Bytes of an element of the bias.
inline int64_t bias_bytes(const AttentionProblem& problem) { return problem.bias_dtype == DType::kFloat32 ? 4 : 2; }

// Where the rows of a mask or a bias begin, if there is one; those of `lanes` without a row where the first one does.
class OperandRows {
 public:
  OperandRows(const ScoreOperand& operand, int64_t element_size, const RowTile& tile, int64_t lanes)
      : key_bytes_(operand.key_stride * element_size), rows_(tile.rows()), lanes_(lanes) {
    if (operand.data == nullptr) return;
    for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
      starts_[row] = static_cast<const char*>(operand.data) +
                     (tile.batch * operand.batch_stride + head * operand.head_stride + query * operand.query_stride) *
                         element_size;
    });
    for (int64_t row = rows_; row < lanes; ++row) starts_[row] = starts_[0];
  }

  int64_t rows() const { return rows_; }
  int64_t lanes() const { return lanes_; }

  template <class T>
  const T* at(int64_t row, int64_t key) const {
    return static_cast<const T*>(static_cast<const void*>(starts_[row] + key * key_bytes_));
  }

  // Fetches what lies so many bytes behind the start of a row into the second cache, since the first is full of what is
  // multiplied. Inline, since compilers leave out calls of functions that do nothing but this.
  [[gnu::always_inline]] void fetch(int64_t row, int64_t offset) const {
    __builtin_prefetch(starts_[row] + offset, 0, 2);
  }

 private:
  int64_t key_bytes_;
  int64_t rows_;
  int64_t lanes_;
  const char* starts_[kMaxRowTile];
};

// The bias of keys to come, fetched while products run: its rows are too far apart for the hardware to foresee them.
class ComingBias {
 public:
  // Fetches nothing unless the bias has rows of keys.
  ComingBias(const AttentionProblem& problem, const OperandRows& rows, bool has_rows)
      : rows_(rows), has_rows_(has_rows), key_bytes_(bias_bytes(problem)) {}

  // Begins with `count` keys, all of which are fetched when fetch_some() has been called `pauses` times.
  void start(int64_t key, int64_t count, int64_t pauses) {
    begin_ = key * key_bytes_;
    end_ = begin_ + count * key_bytes_;
    row_ = has_rows_ ? 0 : rows_.rows();
    rows_at_once_ = pauses == 0 ? 0 : ceil_div(rows_.rows(), pauses);
  }
  [[gnu::always_inline]] void fetch_some() { fetch(rows_at_once_); }
  [[gnu::always_inline]] void fetch_rest() { fetch(rows_.rows()); }

 private:
  [[gnu::always_inline]] void fetch(int64_t count) {
    for (; count > 0 && row_ < rows_.rows(); --count, ++row_) {
      for (int64_t offset = begin_; offset < end_; offset += 64) rows_.fetch(row_, offset);
    }
  }

  const OperandRows& rows_;
  bool has_rows_;
  int64_t key_bytes_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t row_ = 0;
  int64_t rows_at_once_ = 0;
};

struct FetchBias {
  ComingBias& bias;
  [[gnu::always_inline]] void operator()() const { bias.fetch_some(); }
};

// Whether a bias, whose keys are neighbours, leaves one of `count` keys to a row.
template <class T>
inline bool any_left(const OperandRows& bias, int64_t key, int64_t count) {
  for (int64_t row = 0; row < bias.rows(); ++row) {
    const T* source = bias.at<T>(row, key);
    Vec largest = broadcast(-kInfinity);
    for_each_vector(count, [&](int64_t i, auto lanes) {
      const Vec terms = keep(load(source + i, lanes), lanes, largest);
      // NaN takes part.
      largest = where_less(terms, broadcast(kLowest), largest, broadcast(0.0f));
    });
    if (reduce_max(largest) == 0.0f) return true;
  }
  return false;
}

inline bool any_left(const OperandRows& bias, DType dtype, int64_t key, int64_t count) {
  bool any = false;
  visit_dtype(dtype, [&](auto element) { any = any_left<typename decltype(element)::type>(bias, key, count); });
  return any;
}

// Calls use(i, lane, terms) for blocks of the terms of a bias, whose keys are neighbours: terms[k] are those of key
// key + i + k in lanes from `lane` on, -inf for keys from `count` on and in lanes without a row.
template <class T, class Use>
[[gnu::always_inline]] inline void for_each_transposed(const OperandRows& bias, int64_t key, int64_t count, Use&& use) {
  for (int64_t lane = 0; lane < bias.lanes(); lane += kWidth) {
    for_each_vector(count, [&](int64_t i, auto lanes) {
      Vec terms[kWidth];
      for (int k = 0; k < kWidth; ++k) {
        terms[k] = broadcast(-kInfinity);
        if (lane + k < bias.rows()) terms[k] = keep(load(bias.at<T>(lane + k, key) + i, lanes), lanes, terms[k]);
      }
      transpose(terms);
      use(i, lane, terms);
    });
  }
}

// The terms of a bias, whose keys are neighbours, for `count` keys up to a multiple of the vector width: [count,
// lanes].
template <class T>
inline void transpose_bias(const OperandRows& bias, int64_t key, int64_t count, float* terms) {
  for_each_transposed<T>(bias, key, count, [&](int64_t i, int64_t lane, const Vec(&block)[kWidth]) {
    for (int k = 0; k < kWidth; ++k) store(terms + (i + k) * bias.lanes() + lane, block[k], Full{});
  });
}

// Addends [count, width] of a tile of scores; rows up to a multiple of the vector width are written. Where rows differ,
// lanes without a row have no key.
inline Addends fill_addends(const AttentionProblem& problem, const RowTile& tile, int64_t key, int64_t count,
                            int64_t width, float* addends) {
  if (problem.mask.data == nullptr && problem.bias.data == nullptr) return Addends::kNone;
  Vec left = broadcast(0.0f);
  if (same_for_all_rows(problem.mask, tile) && same_for_all_rows(problem.bias, tile)) {
    alignas(64) float row[kMaxKeyTile];
    left = fill_addend_row(problem, tile.batch, tile.head, tile.query, key, count, row);
    if (reduce_max(left) == 0.0f) return Addends::kNothingLeft;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t lane = 0; lane < width; lane += kWidth) {
        store(addends + i * width + lane, broadcast(row[i]), Full{});
      }
    }
    return Addends::kSome;
  }
  if (problem.mask.data == nullptr && has_rows_of_keys(problem.bias, tile)) {
    const OperandRows rows(problem.bias, bias_bytes(problem), tile, width);
    if (!any_left(rows, problem.bias_dtype, key, count)) return Addends::kNothingLeft;
    visit_dtype(problem.bias_dtype,
                [&](auto element) { transpose_bias<typename decltype(element)::type>(rows, key, count, addends); });
    return Addends::kSome;
  }
  alignas(64) float rows[kWidth][kMaxKeyTile];
  const auto flush = [&](int64_t first_row) {
    transpose_rows(rows[0], kMaxKeyTile, kWidth, round_up(count, kWidth), addends + first_row, width);
  };
  const int64_t row_count = tile.rows();
  for (int64_t row = row_count; row % kWidth != 0; ++row) {
    for (int64_t i = 0; i < count; i += kWidth) store(rows[row % kWidth] + i, broadcast(-kInfinity), Full{});
  }
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    left = max(fill_addend_row(problem, tile.batch, head, query, key, count, rows[row % kWidth]), left);
    if (row % kWidth == kWidth - 1 || row == row_count - 1) flush(row / kWidth * kWidth);
  });
  for (int64_t lane = round_up(row_count, kWidth); lane < width; lane += kWidth) {
    for (int64_t i = 0; i < count; ++i) store(addends + i * width + lane, broadcast(-kInfinity), Full{});
  }
  return reduce_max(left) == 0.0f ? Addends::kNothingLeft : Addends::kSome;
}

// e^(2 x) - 1 for 0 <= x, as exact in relation to itself near 0; at least 4e8 for x > 10.
inline Vec expm1_of_twice(Vec x) {
  const Vec bounded = -max(broadcast(-20.0f), -(x + x));
  const Vec n = round_to_integer(bounded * broadcast(1.44269504f));
  Vec r = fma(n, broadcast(-0.693145752f), bounded);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Vec series = broadcast(1.0f / 40320);
  series = fma(series, r, broadcast(1.0f / 5040));
  series = fma(series, r, broadcast(1.0f / 720));
  series = fma(series, r, broadcast(1.0f / 120));
  series = fma(series, r, broadcast(1.0f / 24));
  series = fma(series, r, broadcast(1.0f / 6));
  series = fma(series, r, broadcast(0.5f));
  const Vec small = fma(series * r, r, r);
  const Vec power = times_power_of_two(broadcast(1.0f), n);
  return fma(power, small, power - broadcast(1.0f));
}

inline Vec tanh(Vec x) {
  const Vec growth = expm1_of_twice(abs(x));
  const Vec magnitude = divide(growth, growth + broadcast(2.0f));
  return where_less(x, broadcast(0.0f), -magnitude, magnitude);
}

// What is excluded becomes -inf, whatever it was.
inline Vec add_to_score(Vec score, Vec addend) {
  return where_less(addend, broadcast(kLowest), broadcast(-kInfinity), score + addend);
}

// The largest of `count` rows of a matrix, for one vector of columns; -inf for none, NaN left out.
inline Vec max_of_column(const float* column, int64_t count, int64_t stride) {
  // As many as the latency of a maximum needs.
  constexpr int kParts = 8;
  Vec parts[kParts];
  for (auto& part : parts) part = broadcast(-kInfinity);
  int64_t row = 0;
  for (; row + kParts <= count; row += kParts) {
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) parts[i] = max(load(column + (row + i) * stride, Full{}), parts[i]);
  }
  for (; row < count; ++row) parts[0] = max(load(column + row * stride, Full{}), parts[0]);
  for (int i = 1; i < kParts; ++i) parts[0] = max(parts[i], parts[0]);
  return parts[0];
}

// 2^(x factor) where that is at most 1, with a relative error of 1.2e-7 of a factor without one; 0 below 2^-100, so
// that no product is denormal; NaN for NaN.
inline Vec exp2_of_product(Vec x, Vec factor) {
  // Adding 1.5 * 2^23 rounds to an integer.
  const Vec n = fma(x, factor, broadcast(12582912.0f)) - broadcast(12582912.0f);
  const Vec r = fma(x, factor, -n);
  Vec series = broadcast(1.53533620e-4f);
  series = fma(series, r, broadcast(1.33988750e-3f));
  series = fma(series, r, broadcast(9.61843692e-3f));
  series = fma(series, r, broadcast(5.55033237e-2f));
  series = fma(series, r, broadcast(0.240226477f));
  series = fma(series, r, broadcast(0.693147182f));
  series = fma(series, r, broadcast(1.0f));
  return where_less(n, broadcast(-100.0f), broadcast(0.0f), times_power_of_two(series, n));
}

// How products of queries and keys become scores.
struct Scoring {
  explicit Scoring(const AttentionProblem& problem)
      : scale(broadcast(problem.scale)), softcap(broadcast(problem.softcap)), capped(problem.softcap != 0.0f) {}

  // Before the addends.
  Vec score(Vec product) const { return capped ? softcap * cap_ratio(product) : product * scale; }
  Vec score(Vec product, Vec addend) const {
    if (capped) return add_to_score(score(product), addend);
    return where_less(addend, broadcast(kLowest), broadcast(-kInfinity), fma(product, scale, addend));
  }
  // Of what the cap is to be multiplied by.
  Vec cap_ratio(Vec product) const { return tanh(divide(product * scale, softcap)); }
  // The derivative of the cap.
  Vec slope(Vec ratio) const { return fma(-ratio, ratio, broadcast(1.0f)); }

  Vec scale;
  Vec softcap;
  bool capped;
};

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

// The same for a softmax, which takes products as they are where only their scale is missing.
struct SoftmaxScoring {
  explicit SoftmaxScoring(const AttentionProblem& problem)
      : scoring(problem),
        direct(!scoring.capped && problem.bias.data == nullptr && problem.scale > 0),
        unit(direct ? problem.scale : 1.0f),
        factor(unit * kLog2E) {}

  Vec finish(Vec product, Addends addends, const float* addend) const {
    if (addends == Addends::kNone) return direct ? product : scoring.score(product);
    const Vec term = load(addend, Full{});
    return direct ? add_to_score(product, term) : scoring.score(product, term);
  }

  Scoring scoring;
  bool direct;
  float unit;    // the score that a finished one of 1 stands for
  float factor;  // the same in units of log 2
};

// Running maxima and sums of `kWidth` rows.
struct SoftmaxLanes {
  float* maximum;  // of finished scores
  float* sum;
};

// `unit` is the score that a maximum of 1 stands for.
inline void start_lanes(const AttentionProblem& problem, const RowTile& tile, bool with_sinks, float unit,
                        int64_t width, SoftmaxLanes lanes) {
  for (int64_t lane = 0; lane < width; ++lane) {
    lanes.maximum[lane] = -kInfinity;
    lanes.sum[lane] = 0;
  }
  if (!with_sinks || problem.sinks == nullptr) return;
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t) {
    lanes.maximum[row] = problem.sinks[head] / unit;
    lanes.sum[row] = problem.sinks[head] < kLowest ? 0.0f : 1.0f;
  });
}

inline void finish_lanes(float unit, int64_t width, SoftmaxLanes lanes) {
  for (int64_t lane = 0; lane < width; ++lane) lanes.maximum[lane] *= unit;
}

inline Vec keep_in_range(Vec score, int64_t key, Vec first, Vec last) {
  const Vec position = broadcast(static_cast<float>(key));
  const Vec excluded = broadcast(-kInfinity);
  return where_less(position, first, excluded, where_less(position, last, score, excluded));
}

// Terms that are summed in a register, before they are added to the result: few, so that the error stays small, and
// fewer in generic code, whose products are rounded before they are added.
inline constexpr int64_t kProductTerms = kWidth == 4 ? 16 : kWidth == 8 ? 32 : 64;

// Element (row, k) of a left operand is data[row * stride + k], or data[k * stride + row] if it is transposed.
template <bool kTransposed>
struct Left {
  const float* data;
  int64_t stride;

  const float* at(int64_t row, int64_t k) const {
    return kTransposed ? data + k * stride + row : data + row * stride + k;
  }
};

// Sums kRows rows and kVectors vectors of columns in registers.
template <int kRows, int kVectors, bool kTransposed>
[[gnu::always_inline]] inline void multiply_block(Left<kTransposed> left, const float* right, int64_t right_stride,
                                                  int64_t terms, bool add, float* result, int64_t result_stride) {
  Vec sums[kRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = broadcast(0.0f);
  }
  for (int64_t k = 0; k < terms; ++k) {
    Vec columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = load(right + k * right_stride + v * kWidth, Full{});
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(*left.at(row, k));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fma(factor, columns[v], sums[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* total = result + row * result_stride + v * kWidth;
      store(total, add ? load(total, Full{}) + sums[row][v] : sums[row][v], Full{});
    }
  }
}

inline constexpr auto kNothing = [] {};

// kVectors vectors of columns; between() runs once for each block. Not inline, since the innermost loop needs all
// registers.
template <int kRows, int kVectors, bool kTransposed, class Between>
[[gnu::noinline]] void multiply_columns(Left<kTransposed> left, int64_t rows, const float* right, int64_t right_stride,
                                        int64_t terms, bool add, float* result, int64_t result_stride,
                                        Between&& between) {
  for (int64_t row = 0; row < rows; row += kRows) {
    between();
    multiply_block<kRows, kVectors>(Left<kTransposed>{left.at(row, 0), left.stride}, right, right_stride, terms, add,
                                    result + row * result_stride, result_stride);
  }
}

// result[row][column] = the sum over k of left(row, k) * right[k][column], or adds it. Columns are whole vectors. The
// order of a sum depends on the number of terms alone. Meanwhile between() runs from time to time: at least once for
// every kProductRows rows by kProductTerms terms.
template <bool kTransposed, class Between = decltype(kNothing)&>
inline void multiply(Left<kTransposed> left, int64_t rows, const float* right, int64_t right_stride, int64_t columns,
                     int64_t terms, bool add, float* result, int64_t result_stride, Between&& between = kNothing) {
  for (int64_t begin = 0; begin < terms; begin += kProductTerms) {
    const int64_t count = smaller(kProductTerms, terms - begin);
    const Left<kTransposed> panel = {left.at(0, begin), left.stride};
    const auto multiply_some = [&](auto multiply_these, int64_t column) {
      multiply_these(panel, rows, right + begin * right_stride + column, right_stride, count, add || begin > 0,
                     result + column, result_stride, between);
    };
    int64_t column = 0;
    // A wide block loads less for each product, a high one has more sums under way where columns are few.
    if constexpr (kWidth == 16) {
      for (; column + 4 * kWidth <= columns; column += 4 * kWidth) {
        multiply_some(multiply_columns<4, 4, kTransposed, Between&>, column);
      }
    }
    for (; column + 2 * kWidth <= columns; column += 2 * kWidth) {
      multiply_some(multiply_columns<kProductRows, 2, kTransposed, Between&>, column);
    }
    if (column < columns) multiply_some(multiply_columns<kProductRows, 1, kTransposed, Between&>, column);
  }
}

// Adds the same sums, in which rows of the right operand that hold inf or NaN do not show where their factor is 0.
template <bool kTransposed>
[[gnu::noinline]] void add_selected_product(Left<kTransposed> left, int64_t rows, const float* right,
                                            int64_t right_stride, int64_t columns, int64_t terms, float* result,
                                            int64_t result_stride) {
  for (int64_t begin = 0; begin < terms; begin += kProductTerms) {
    const int64_t end = smaller(begin + kProductTerms, terms);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; column += kWidth) {
        Vec sum = broadcast(0.0f);
        for (int64_t k = begin; k < end; ++k) {
          const float factor = *left.at(row, k);
          if (factor != 0.0f) sum = fma(broadcast(factor), load(right + k * right_stride + column, Full{}), sum);
        }
        float* total = result + row * result_stride + column;
        store(total, load(total, Full{}) + sum, Full{});
      }
    }
  }
}

template <bool kTransposed, class Between = decltype(kNothing)&>
inline void add_product(Left<kTransposed> left, int64_t rows, const float* right, bool right_finite,
                        int64_t right_stride, int64_t columns, int64_t terms, float* result, int64_t result_stride,
                        Between&& between = kNothing) {
  if (right_finite) {
    multiply(left, rows, right, right_stride, columns, terms, true, result, result_stride, between);
  } else {
    add_selected_product(left, rows, right, right_stride, columns, terms, result, result_stride);
  }
}

// The logarithm of the sum of weights.
inline float lse_of(float maximum, float sum) { return sum == 0.0f ? -kInfinity : maximum + __builtin_logf(sum); }

// The factor that makes a sum of weighted values their mean.
inline float mean_factor(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

template <class T>
inline void store_row(const float* sums, float factor, int64_t dim, T* output) {
  for_each_vector(dim,
                  [&](int64_t i, auto lanes) { store(output + i, load(sums + i, lanes) * broadcast(factor), lanes); });
}

inline int64_t row_index(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t query) {
  return (batch * problem.heads + head) * problem.queries + query;
}

// Stores what a tile has of its rows: sums of weighted values, with the maximum of the scores and the sum of the
// weights. multiplied_sum is the sum of the weights as they were rounded for the products, or `sum` itself.
template <class T>
void store_results(const AttentionArgs& args, const RowTile& tile, int64_t split, const float* sums, int64_t stride,
                   const float* maximum, const float* sum, const float* multiplied_sum) {
  const AttentionProblem& problem = args.problem;
  const int64_t dim = problem.value_dim;
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    const int64_t index = row_index(problem, tile.batch, head, query);
    if (args.splits == 1) {
      args.lse[index] = lse_of(maximum[row], sum[row]);
      store_row(sums + row * stride, mean_factor(multiplied_sum[row]), dim, static_cast<T*>(args.output) + index * dim);
      return;
    }
    const int64_t part = split * problem.batch * problem.heads * problem.queries + index;
    args.split_maximum[part] = maximum[row];
    args.split_sum[part] = sum[row];
    // The merge divides by the sum of the weights. The quotient of equal sums is exactly 1.
    const float factor = multiplied_sum[row] == 0.0f ? 0.0f : sum[row] / multiplied_sum[row];
    store_row(sums + row * stride, factor, dim, args.split_output + part * dim);
  });
}

inline float first_lane(Vec v) {
  float lane;
  store(&lane, v, Partial{1});
  return lane;
}

}  // namespace
}  // namespace rudnn::RUDNN_ISA
