// Gradients of attention over the same tiles, in float32, for any vector width. Probabilities are computed again.
#include "cpu/attention_tiles.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// The memory of a tile of keys and a tile of rows.
struct PairMemory {
  PairMemory(const AttentionProblem& problem, float* memory)
      : dim(round_up(problem.head_dim, kWidth)), value_dim(round_up(problem.value_dim, kWidth)) {
    Scratch scratch(memory);
    keys = scratch.take(kKeyTile * dim);
    values = scratch.take(kKeyTile * value_dim);
    grad_keys = scratch.take(kKeyTile * dim);
    grad_values = scratch.take(kKeyTile * value_dim);
    probabilities = scratch.take(kKeyTile * kRowTile);
    grad_scores = scratch.take(kKeyTile * kRowTile);
    slopes = scratch.take(kKeyTile * kRowTile);
    addends = scratch.take(kKeyTile * kRowTile);
    size = scratch.taken();
  }

  int64_t dim;
  int64_t value_dim;
  float* keys;
  float* values;
  float* grad_keys;
  float* grad_values;
  float* probabilities;  // [kKeyTile, width]
  float* grad_scores;    // of the scores with their addends, and from cap() on of those before the cap
  float* slopes;         // of the cap
  float* addends;
  int64_t size;
  bool keys_finite = true;
};

// What is kept of a tile of rows while the tiles of keys go by.
struct RowMemory {
  RowMemory(const PairMemory& pair, float* memory) {
    Scratch scratch(memory);
    queries = scratch.take(kRowTile * pair.dim);
    queries_t = scratch.take(kRowTile * pair.dim);
    grad = scratch.take(kRowTile * pair.value_dim);
    grad_t = scratch.take(kRowTile * pair.value_dim);
    grad_query = scratch.take(kRowTile * pair.dim);
    lse = scratch.take(kRowTile);
    delta = scratch.take(kRowTile);
    queries_finite = scratch.take(1);
    grad_finite = scratch.take(1);
    size = scratch.taken();
  }

  float* queries;         // [rows, D]
  float* queries_t;       // [D, width]
  float* grad;            // [rows, Dv]
  float* grad_t;          // [Dv, width]
  float* grad_query;      // [rows, D]
  float* lse;             // [width]
  float* delta;           // [width]
  float* queries_finite;  // 1 if all are
  float* grad_finite;
  int64_t size;
};

// Returns whether all elements are finite.
template <class T>
inline bool load_rows(const HeadRows& source, const RowTile& tile, int64_t head_dim, int64_t dim, int64_t width,
                      float* rows, float* transposed) {
  load_columns<T>(source, tile, head_dim, dim, width, rows, transposed);
  return all_finite({rows, dim}, tile.rows(), dim);
}

template <class T>
void load_row_memory(const AttentionBackwardArgs& args, const RowTile& tile, const PairMemory& pair, RowMemory& rows) {
  const AttentionProblem& problem = args.problem;
  const int64_t width = round_up(tile.rows(), kWidth);
  *rows.queries_finite =
      load_rows<T>(problem.query, tile, problem.head_dim, pair.dim, width, rows.queries, rows.queries_t);
  *rows.grad_finite = load_rows<T>(args.grad, tile, problem.value_dim, pair.value_dim, width, rows.grad, rows.grad_t);
  for (int64_t lane = 0; lane < width; ++lane) rows.lse[lane] = rows.delta[lane] = 0;
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    const int64_t index = row_index(problem, tile.batch, head, query);
    rows.lse[row] = args.lse[index];
    rows.delta[row] = args.delta[index];
  });
}

template <class T>
void load_keys(const AttentionProblem& problem, int64_t batch, int64_t key_head, int64_t key, int64_t count,
               PairMemory& pair) {
  widen_rows(rows_of<T>(problem.key, batch, key_head) + key * problem.key.row_stride, problem.key.row_stride, count,
             problem.head_dim, pair.keys, pair.dim);
  pair.keys_finite = all_finite({pair.keys, pair.dim}, count, pair.dim);
  widen_rows(rows_of<T>(problem.value, batch, key_head) + key * problem.value.row_stride, problem.value.row_stride,
             count, problem.value_dim, pair.values, pair.value_dim);
}

// e^(a - b), in which what rounding the difference loses is made up for; 0 where a is -inf.
inline Vec exp_of_difference(Vec a, Vec b) {
  const Vec difference = a - b;
  const Vec subtracted = a - difference;
  const Vec lost = (a - (difference + subtracted)) + (subtracted - b);
  const Vec power = exp(difference);
  return where_less(a, broadcast(kLowest), broadcast(0.0f), fma(power, lost, power));
}

// From products of queries and keys, and of gradients and values, to probabilities and the gradients of scores.
inline void differentiate_softmax(const Scoring& scoring, Addends addends, const LaneKeys* lane_keys, int64_t count,
                                  int64_t width, const RowMemory& rows, PairMemory& pair) {
  for (int64_t lane = 0; lane < width; lane += kWidth) {
    const Vec lse = load(rows.lse + lane, Full{});
    const Vec delta = load(rows.delta + lane, Full{});
    Vec first = broadcast(0.0f);
    Vec last = first;
    if (lane_keys != nullptr) {
      first = load(lane_keys->first + lane, Full{});
      last = load(lane_keys->last + lane, Full{});
    }
    for (int64_t key = 0; key < count; ++key) {
      const int64_t i = key * width + lane;
      const Vec product = load(pair.probabilities + i, Full{});
      if (scoring.capped) store(pair.slopes + i, scoring.slope(scoring.cap_ratio(product)), Full{});
      Vec score =
          addends == Addends::kSome ? scoring.score(product, load(pair.addends + i, Full{})) : scoring.score(product);
      if (lane_keys != nullptr) score = keep_in_range(score, key, first, last);
      const auto unless_excluded = [&](Vec x) { return where_less(score, broadcast(kLowest), broadcast(0.0f), x); };
      const Vec probability = exp_of_difference(score, lse);
      store(pair.probabilities + i, probability, Full{});
      store(pair.grad_scores + i, unless_excluded(probability * (load(pair.grad_scores + i, Full{}) - delta)), Full{});
    }
  }
}

// From the gradients of scores to those before the cap. Where a score is excluded its slope may be NaN.
inline void cap_gradients(const Scoring& scoring, int64_t count, int64_t width, PairMemory& pair) {
  if (!scoring.capped) return;
  for (int64_t i = 0; i < count * width; i += kWidth) {
    const Vec gradient = load(pair.grad_scores + i, Full{});
    const Vec product = gradient * load(pair.slopes + i, Full{});
    store(pair.grad_scores + i, where_less(broadcast(0.0f), abs(gradient), product, gradient), Full{});
  }
}

// Probabilities and gradients of scores of a tile of rows and keys [key, key + count), which are loaded. Returns false
// where no key takes part.
bool differentiate_scores(const AttentionProblem& problem, const RowTile& tile, int64_t key, int64_t count,
                          const RowMemory& rows, PairMemory& pair) {
  const TileKeys tile_keys(problem, tile);
  if (!tile_keys.some_have(key, key + count)) return false;
  const int64_t width = round_up(tile.rows(), kWidth);
  const Addends addends = fill_addends(problem, tile, key, count, width, pair.addends);
  if (addends == Addends::kNothingLeft) return false;
  LaneKeys lane_keys;
  const bool partial = !tile_keys.all_have(key, key + count);
  if (partial) fill_lane_keys(problem, tile, key, width, lane_keys);
  multiply(Left<false>{pair.keys, pair.dim}, count, rows.queries_t, width, width, problem.head_dim, false,
           pair.probabilities, width);
  multiply(Left<false>{pair.values, pair.value_dim}, count, rows.grad_t, width, width, problem.value_dim, false,
           pair.grad_scores, width);
  differentiate_softmax(Scoring(problem), addends, partial ? &lane_keys : nullptr, count, width, rows, pair);
  return true;
}

template <class T>
inline void store_gradients(const float* sums, int64_t stride, float factor, int64_t count, int64_t dim, T* gradients) {
  for (int64_t row = 0; row < count; ++row) {
    for_each_vector(dim, [&](int64_t i, auto lanes) {
      store(gradients + row * dim + i, load(sums + row * stride + i, lanes) * broadcast(factor), lanes);
    });
  }
}

// A key head and what is kept of its rows.
struct GradHead {
  GradHead(const AttentionBackwardArgs& args, int64_t index, const PairMemory& pair, float* memory)
      : problem(args.problem),
        batch(index / problem.key_heads),
        key_head(index % problem.key_heads),
        first_key(index * problem.keys),
        tiles(row_tiles_of(problem, kRowTile).count),
        pair(pair),
        memory(memory),
        rows_size(RowMemory(pair, nullptr).size) {}

  RowTile tile(int64_t index) const { return row_tile(problem, kRowTile, batch, key_head, index); }
  RowMemory rows(int64_t index) const { return RowMemory(pair, memory + index * rows_size); }

  const AttentionProblem& problem;
  int64_t batch;
  int64_t key_head;
  int64_t first_key;  // among those of all key heads
  int64_t tiles;
  const PairMemory& pair;
  float* memory;
  int64_t rows_size;
};

inline void add_grad_query(const RowTile& tile, int64_t count, const RowMemory& rows, const PairMemory& pair) {
  const int64_t width = round_up(tile.rows(), kWidth);
  add_product(Left<true>{pair.grad_scores, width}, tile.rows(), pair.keys, pair.keys_finite, pair.dim, pair.dim, count,
              rows.grad_query, pair.dim);
}

// Gradients of keys and values of a tile of keys; those of queries are added up if it is asked for.
template <class T>
void differentiate_keys(const AttentionBackwardArgs& args, const GradHead& head, int64_t key, bool queries_too,
                        PairMemory& pair) {
  const AttentionProblem& problem = args.problem;
  const int64_t count = smaller(kKeyTile, problem.keys - key);
  load_keys<T>(problem, head.batch, head.key_head, key, count, pair);
  clear(pair.grad_keys, kKeyTile * pair.dim);
  clear(pair.grad_values, kKeyTile * pair.value_dim);
  for (int64_t index = 0; index < head.tiles; ++index) {
    const RowTile tile = head.tile(index);
    const RowMemory rows = head.rows(index);
    if (!differentiate_scores(problem, tile, key, count, rows, pair)) continue;
    const int64_t row_count = tile.rows();
    const int64_t width = round_up(row_count, kWidth);
    cap_gradients(Scoring(problem), count, width, pair);
    if (args.grad_value != nullptr) {
      add_product(Left<false>{pair.probabilities, width}, count, rows.grad, *rows.grad_finite != 0, pair.value_dim,
                  pair.value_dim, row_count, pair.grad_values, pair.value_dim);
    }
    if (args.grad_key != nullptr) {
      add_product(Left<false>{pair.grad_scores, width}, count, rows.queries, *rows.queries_finite != 0, pair.dim,
                  pair.dim, row_count, pair.grad_keys, pair.dim);
    }
    if (queries_too) add_grad_query(tile, count, rows, pair);
  }
  const int64_t first = head.first_key + key;
  if (args.grad_key != nullptr) {
    store_gradients(pair.grad_keys, pair.dim, problem.scale, count, problem.head_dim,
                    static_cast<T*>(args.grad_key) + first * problem.head_dim);
  }
  if (args.grad_value != nullptr) {
    store_gradients(pair.grad_values, pair.value_dim, 1.0f, count, problem.value_dim,
                    static_cast<T*>(args.grad_value) + first * problem.value_dim);
  }
}

template <class T>
void store_grad_query(const AttentionBackwardArgs& args, const GradHead& head, int64_t index) {
  const AttentionProblem& problem = args.problem;
  const RowMemory rows = head.rows(index);
  for_each_row(head.tile(index), [&](int64_t row, int64_t query_head, int64_t query) {
    store_row(rows.grad_query + row * head.pair.dim, problem.scale, problem.head_dim,
              static_cast<T*>(args.grad_query) + row_index(problem, head.batch, query_head, query) * problem.head_dim);
  });
}

template <class T>
void load_rows_of_head(const AttentionBackwardArgs& args, const GradHead& head, int64_t index) {
  RowMemory rows = head.rows(index);
  load_row_memory<T>(args, head.tile(index), head.pair, rows);
  clear(rows.grad_query, kRowTile * head.pair.dim);
}

// Adds the gradients of a tile of scores to those of a tile of the bias, summed over axes that the bias does not have.
inline void add_bias_gradients(const RowTile& tile, int64_t count, const float* grad_scores, bool has_queries,
                               bool has_keys, double* sums) {
  const int64_t rows = tile.rows();
  const int64_t width = round_up(rows, kWidth);
  for (int64_t key = 0; key < count; ++key) {
    const float* gradients = grad_scores + key * width;
    if (has_queries) {
      double* column = sums + (has_keys ? key * kRowTile : 0);
      for (int64_t row = 0; row < rows; ++row) column[row] += gradients[row];
    } else {
      double sum = 0;
      for (int64_t row = 0; row < rows; ++row) sum += gradients[row];
      sums[has_keys ? key * kRowTile : 0] += sum;
    }
  }
}

template <class T>
void differentiate_bias(const AttentionBackwardArgs& args, int64_t unit, float* memory) {
  const AttentionProblem& problem = args.problem;
  const int64_t (&shape)[4] = args.bias_shape;
  const int64_t group = problem.heads / problem.key_heads;
  const int64_t query_tiles = ceil_div(shape[2], kRowTile), key_tiles = ceil_div(shape[3], kKeyTile);
  const bool has_queries = shape[2] == problem.queries, has_keys = shape[3] == problem.keys;
  const int64_t key_tile = unit % key_tiles, query_tile = unit / key_tiles % query_tiles;
  const int64_t head = unit / key_tiles / query_tiles % shape[1], batch = unit / key_tiles / query_tiles / shape[1];

  PairMemory pair(problem, memory);
  RowMemory rows(pair, memory + pair.size);
  auto* sums = reinterpret_cast<double*>(memory + pair.size + rows.size);
  for (int64_t i = 0; i < kRowTile * kKeyTile; ++i) sums[i] = 0;
  // Of an axis that the bias has, one position or one tile; of another, all.
  const auto range = [](bool has, int64_t first, int64_t step, int64_t length) {
    return has ? KeyRange{first, smaller(first + step, length)} : KeyRange{0, length};
  };
  const KeyRange batches = range(shape[0] == problem.batch, batch, 1, problem.batch);
  const KeyRange heads = range(shape[1] == problem.heads, head, 1, problem.heads);
  const KeyRange queries = range(has_queries, query_tile * kRowTile, kRowTile, problem.queries);
  const KeyRange keys = range(has_keys, key_tile * kKeyTile, kKeyTile, problem.keys);
  for (int64_t b = batches.first; b < batches.last; ++b) {
    for (int64_t h = heads.first; h < heads.last; ++h) {
      for (int64_t query = queries.first; query < queries.last; query += kRowTile) {
        const RowTile tile = {b, h / group, h, 1, query, smaller(kRowTile, problem.queries - query)};
        load_row_memory<T>(args, tile, pair, rows);
        for (int64_t key = keys.first; key < keys.last; key += kKeyTile) {
          const int64_t count = smaller(kKeyTile, problem.keys - key);
          load_keys<T>(problem, b, h / group, key, count, pair);
          if (!differentiate_scores(problem, tile, key, count, rows, pair)) continue;
          add_bias_gradients(tile, count, pair.grad_scores, has_queries, has_keys, sums);
        }
      }
    }
  }
  visit_dtype(problem.bias_dtype, [&](auto element) {
    using Bias = typename decltype(element)::type;
    auto* output = static_cast<Bias*>(args.grad_bias) + (batch * shape[1] + head) * shape[2] * shape[3];
    for (int64_t i = query_tile * kRowTile; i < smaller((query_tile + 1) * kRowTile, shape[2]); ++i) {
      for (int64_t j = key_tile * kKeyTile; j < smaller((key_tile + 1) * kKeyTile, shape[3]); ++j) {
        const auto sum = static_cast<float>(sums[j % kKeyTile * kRowTile + i % kRowTile]);
        store(output + i * shape[3] + j, broadcast(sum), Partial{1});
      }
    }
  });
}

// The sums of grad * output of `count` rows, in the order of the products of grad and values: of a single key they are
// then the same.
template <class T>
Vec delta_of(const T* const (&grads)[kWidth], const T* const (&outputs)[kWidth], int64_t count, int64_t dim) {
  Vec total = broadcast(0.0f);
  for (int64_t begin = 0; begin < dim; begin += kProductTerms) {
    Vec sum = broadcast(0.0f);
    for_each_vector(smaller(kProductTerms, dim - begin), [&](int64_t i, auto lanes) {
      Vec grad[kWidth];
      Vec output[kWidth];
      for (int64_t row = 0; row < kWidth; ++row) {
        grad[row] = row < count ? load(grads[row] + begin + i, lanes) : broadcast(0.0f);
        output[row] = row < count ? load(outputs[row] + begin + i, lanes) : broadcast(0.0f);
      }
      transpose(grad);
      transpose(output);
      for (int column = 0; column < kWidth; ++column) {
        // An output of 0 may be that of a row without keys, whose gradient does not show.
        sum = where_less(abs(output[column]), broadcast(kLeastNormal), sum, fma(output[column], grad[column], sum));
      }
    });
    total = begin == 0 ? sum : total + sum;
  }
  return total;
}

}  // namespace

int64_t attention_grad_rows_size(const AttentionProblem& problem) {
  return row_tiles_of(problem, kRowTile).count * RowMemory(PairMemory(problem, nullptr), nullptr).size;
}

int64_t attention_grad_scratch(const AttentionProblem& problem) { return PairMemory(problem, nullptr).size; }

int64_t attention_grad_bias_scratch(const AttentionProblem& problem) {
  const PairMemory pair(problem, nullptr);
  return pair.size + RowMemory(pair, nullptr).size + 2 * kRowTile * kKeyTile;
}

void attention_delta(const AttentionBackwardArgs& args, float*, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  visit_dtype(problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for (int64_t first = begin; first < end; first += kWidth) {
      const int64_t count = smaller(kWidth, end - first);
      const T* grads[kWidth] = {};
      const T* outputs[kWidth] = {};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t query = (first + i) % problem.queries;
        const int64_t head = (first + i) / problem.queries % problem.heads;
        const int64_t batch = (first + i) / problem.queries / problem.heads;
        grads[i] = rows_of<T>(args.grad, batch, head) + query * args.grad.row_stride;
        outputs[i] = rows_of<T>(args.output, batch, head) + query * args.output.row_stride;
      }
      const Vec delta = delta_of(grads, outputs, count, problem.value_dim);
      if (count == kWidth) {
        store(args.delta + first, delta, Full{});
      } else {
        store(args.delta + first, delta, Partial{static_cast<int>(count)});
      }
    }
  });
}

void attention_grad_heads(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  visit_dtype(args.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    PairMemory pair(args.problem, scratch);
    for (int64_t unit = begin; unit < end; ++unit) {
      const GradHead head(args, unit, pair, scratch + pair.size);
      for (int64_t index = 0; index < head.tiles; ++index) load_rows_of_head<T>(args, head, index);
      const bool queries_too = args.grad_query != nullptr;
      for (int64_t key = 0; key < args.problem.keys; key += kKeyTile) {
        differentiate_keys<T>(args, head, key, queries_too, pair);
      }
      for (int64_t index = 0; queries_too && index < head.tiles; ++index) store_grad_query<T>(args, head, index);
    }
  });
}

void attention_grad_rows(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  visit_dtype(args.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const PairMemory pair(args.problem, scratch);
    const GradHead head(args, args.shared_head, pair, args.shared_rows);
    for (int64_t index = begin; index < end; ++index) load_rows_of_head<T>(args, head, index);
  });
}

void attention_grad_keys(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  visit_dtype(args.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    PairMemory pair(args.problem, scratch);
    const GradHead head(args, args.shared_head, pair, args.shared_rows);
    for (int64_t tile = begin; tile < end; ++tile) differentiate_keys<T>(args, head, tile * kKeyTile, false, pair);
  });
}

void attention_grad_queries(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  visit_dtype(problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    PairMemory pair(problem, scratch);
    const GradHead head(args, args.shared_head, pair, args.shared_rows);
    for (int64_t index = begin; index < end; ++index) {
      const RowTile tile = head.tile(index);
      const RowMemory rows = head.rows(index);
      for (int64_t key = 0; key < problem.keys; key += kKeyTile) {
        const int64_t count = smaller(kKeyTile, problem.keys - key);
        if (!TileKeys(problem, tile).some_have(key, key + count)) continue;
        load_keys<T>(problem, head.batch, head.key_head, key, count, pair);
        if (!differentiate_scores(problem, tile, key, count, rows, pair)) continue;
        cap_gradients(Scoring(problem), count, round_up(tile.rows(), kWidth), pair);
        add_grad_query(tile, count, rows, pair);
      }
      store_grad_query<T>(args, head, index);
    }
  });
}

void attention_grad_bias(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  visit_dtype(args.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for (int64_t unit = begin; unit < end; ++unit) differentiate_bias<T>(args, unit, scratch);
  });
}

void attention_grad_sinks(const AttentionBackwardArgs& args, float*, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  for (int64_t head = begin; head < end; ++head) {
    const float sink = problem.sinks[head];
    double sum = 0;
    for (int64_t batch = 0; batch < problem.batch && !(sink < kLowest); ++batch) {
      const int64_t first = row_index(problem, batch, head, 0);
      for (int64_t row = first; row < first + problem.queries; ++row) {
        sum -= static_cast<double>(first_lane(exp(broadcast(sink - args.lse[row]))) * args.delta[row]);
      }
    }
    visit_dtype(args.sinks_dtype, [&](auto element) {
      using T = typename decltype(element)::type;
      store(static_cast<T*>(args.grad_sinks) + head, broadcast(static_cast<float>(sum)), Partial{1});
    });
  }
}

}  // namespace rudnn::RUDNN_ISA
