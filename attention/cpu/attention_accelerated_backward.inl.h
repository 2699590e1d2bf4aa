// Gradients of attention by products of bfloat16 pairs: gradients of keys, values and queries of a key head, a tile of
// kGradKeys keys after the other, over tiles of kGradRows rows each. Probabilities and gradients of scores, a row for
// each key, are left operands of the products over rows, and in pairs right operands of the one over keys.

namespace rudnn::RUDNN_ISA {
namespace {

inline constexpr int64_t kGradChunks = kGradKeys / kKeyChunk;
inline constexpr int64_t kLanes = kAcceleratedRows;
// Of the largest head.
inline constexpr int64_t kMaxPackedDim = 1024;
inline constexpr int64_t kSubtiles = kGradRows / kLanes;

// What is kept of a tile of rows while the tiles of keys go by.
struct GradRows {
  GradRows(const AttentionProblem& problem, float* memory) {
    const int64_t dim = packed(problem.head_dim), value_dim = packed(problem.value_dim);
    Scratch scratch(memory);
    queries = as_bfloat16(scratch.take(dim * kGradRows / 2));
    query_pairs = as_bfloat16(scratch.take(dim * kGradRows / 2));
    grad = as_bfloat16(scratch.take(value_dim * kGradRows / 2));
    grad_pairs = as_bfloat16(scratch.take(value_dim * kGradRows / 2));
    grad_query = scratch.take(dim * kGradRows);
    lse = scratch.take(kGradRows);
    delta = scratch.take(kGradRows);
    queries_finite = scratch.take(kGradRows);
    grad_finite = scratch.take(kGradRows);
    size = scratch.taken();
  }

  bfloat16* queries;      // right operands with rows as columns, one for each kLanes rows
  bfloat16* query_pairs;  // right operands with pairs of rows, one for each 32 columns
  bfloat16* grad;
  bfloat16* grad_pairs;
  float* grad_query;  // [kSubtiles, D, kLanes]
  float* lse;         // inf for rows without keys
  float* delta;
  float* queries_finite;  // 1 for each row of which all elements are; other elements are 0 in the pairs
  float* grad_finite;
  int64_t size;
};

// The memory of a tile of keys and a tile of rows.
struct GradTile {
  GradTile(const AttentionProblem& problem, float* memory)
      : dim(packed(problem.head_dim)), value_dim(packed(problem.value_dim)) {
    Scratch scratch(memory);
    keys = as_bfloat16(scratch.take(kGradKeys * dim / 2));
    values = as_bfloat16(scratch.take(kGradKeys * value_dim / 2));
    keys_t = as_bfloat16(scratch.take(kGradKeys * dim / 2));
    grad_keys = scratch.take(kGradKeys * dim);
    grad_values = scratch.take(kGradKeys * value_dim);
    scores = scratch.take(kGradKeys * kGradRows);
    grad_weights = scratch.take(kGradKeys * kGradRows);
    addends = scratch.take(kGradKeys * kGradRows);
    probabilities = as_bfloat16(scratch.take(kGradKeys * kGradRows / 2));
    grad_scores = as_bfloat16(scratch.take(kGradKeys * kGradRows / 2));
    grad_score_pairs = as_bfloat16(scratch.take(kGradKeys * kGradRows / 2));
    size = scratch.taken();
  }

  int64_t dim;
  int64_t value_dim;
  bfloat16* keys;              // [kGradKeys, D]
  bfloat16* values;            // [kGradKeys, Dv]
  bfloat16* keys_t;            // [kGradChunks, D, kKeyChunk]
  float* grad_keys;            // [kGradChunks, D / 32, kKeyChunk, 32]
  float* grad_values;          // [kGradChunks, Dv / 32, kKeyChunk, 32]
  float* scores;               // [kSubtiles, kGradKeys, kLanes]
  float* grad_weights;         // likewise
  float* addends;              // [kGradKeys, kGradRows]
  bfloat16* probabilities;     // [kGradKeys, kGradRows]
  bfloat16* grad_scores;       // [kGradKeys, kGradRows]
  bfloat16* grad_score_pairs;  // right operands, one for each kLanes rows
  int64_t size;
  bool keys_finite[kGradChunks] = {};
};

// Rows as right operands with pairs of rows, one for each 32 columns: kSubtiles steps of kLanes rows. Elements that are
// not finite count as 0, and so do rows that are not there.
inline void pack_row_pairs(const bfloat16* const* rows, int64_t dim, bfloat16* right, float* finite) {
  for (int64_t row = 0; row < kGradRows; ++row) {
    __mmask32 bad = 0;
    for (int64_t column = 0; rows[row] != nullptr && column < dim; column += 32) {
      bad |= not_finite(load_row(rows[row], column, dim));
    }
    finite[row] = bad == 0 ? 1.0f : 0.0f;
  }
  const auto half_row = [&](int64_t row, int64_t column) {
    if (rows[row] == nullptr || column >= dim) return _mm256_setzero_si256();
    const int64_t count = smaller(dim - column, 16);
    const __m256i elements = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), rows[row] + column);
    if (finite[row] != 0.0f) return elements;
    const __mmask32 bad = not_finite(_mm512_castsi256_si512(elements));
    return _mm256_maskz_mov_epi16(static_cast<__mmask16>(~bad), elements);
  };
  for (int64_t column = 0; column < packed(dim); column += 16) {
    bfloat16* block = right + column / 32 * (kGradRows * 32) + column % 32 / 16 * 512;
    for (int64_t row = 0; row < kGradRows; row += 2) {
      _mm512_store_si512(block + row / 32 * 1024 + row % 32 / 2 * 32,
                         pair_up(half_row(row, column), half_row(row + 1, column)));
    }
  }
}

// The sums of grad * output of kLanes rows, by the products that those with values are: of a single key they are then
// the same.
inline void set_delta(const bfloat16* const* outputs, int64_t dim, const bfloat16* grad, float* delta) {
  alignas(64) bfloat16 left[kLanes * kMaxPackedDim];
  alignas(64) float products[kLanes * kLanes];
  for (int64_t row = 0; row < kLanes; ++row) {
    for (int64_t column = 0; column < dim; column += kPackedDim) {
      _mm512_store_si512(left + row * packed(dim) + column,
                         outputs[row] != nullptr ? load_row(outputs[row], column, dim) : _mm512_setzero_si512());
    }
  }
  Products::multiply(left, packed(dim), kPackedDim, grad, packed(dim) / kPackedDim, false, products);
  for (int64_t row = 0; row < kLanes; ++row) delta[row] = products[row * kLanes + row];
}

inline void load_grad_rows(const AttentionBackwardArgs& args, const RowTile& tile, const GradRows& rows) {
  const AttentionProblem& problem = args.problem;
  const int64_t dim = packed(problem.head_dim), value_dim = packed(problem.value_dim);
  const RowPointers queries(problem.query, tile);
  const RowPointers grad(args.grad, tile);
  for (int64_t row = 0; row < tile.rows(); row += kLanes) {
    pack_columns(queries.rows + row, problem.head_dim, 2, rows.queries + row * dim);
    pack_columns(grad.rows + row, problem.value_dim, 2, rows.grad + row * value_dim);
  }
  pack_row_pairs(queries.rows, problem.head_dim, rows.query_pairs, rows.queries_finite);
  pack_row_pairs(grad.rows, problem.value_dim, rows.grad_pairs, rows.grad_finite);
  for (int64_t row = 0; row < kGradRows; ++row) {
    rows.lse[row] = kInfinity;
  }
  for_each_row(tile, [&](int64_t row, int64_t head, int64_t query) {
    const int64_t index = row_index(problem, tile.batch, head, query);
    rows.lse[row] = args.lse[index] < kLowest ? kInfinity : args.lse[index];
  });
  for (int64_t row = 0; row < tile.rows(); row += kLanes) {
    set_delta(RowPointers(args.output, tile).rows + row, problem.value_dim, rows.grad + row * value_dim,
              rows.delta + row);
  }
  clear(rows.grad_query, dim * kGradRows);
}

inline void load_grad_keys(const AttentionProblem& problem, int64_t batch, int64_t key_head, int64_t key,
                           GradTile& tile) {
  const bfloat16* keys = rows_of<bfloat16>(problem.key, batch, key_head);
  const bfloat16* values = rows_of<bfloat16>(problem.value, batch, key_head);
  for (int64_t chunk = 0; chunk < kGradChunks; ++chunk) {
    const int64_t first = key + chunk * kKeyChunk;
    const int64_t count = larger(smaller(kKeyChunk, problem.keys - first), 0);
    const bfloat16* key_rows = keys + first * problem.key.row_stride;
    const bfloat16* value_rows = values + first * problem.value.row_stride;
    copy_rows(key_rows, problem.key.row_stride, count, problem.head_dim, tile.keys + chunk * kKeyChunk * tile.dim);
    copy_rows(value_rows, problem.value.row_stride, count, problem.value_dim,
              tile.values + chunk * kKeyChunk * tile.value_dim);
    tile.keys_finite[chunk] = transpose_chunk(key_rows, problem.key.row_stride, count, problem.head_dim,
                                              tile.keys_t + chunk * kKeyChunk * tile.dim);
  }
}

// Probabilities and gradients of scores of one vector of rows, from their products.
inline void differentiate_lanes(const SoftmaxScoring& scoring, Addends addends, const LaneKeys* lane_keys, int64_t row,
                                int64_t keys, const GradRows& rows, GradTile& tile) {
  const Vec lse = load(rows.lse + row, Full{});
  const Vec delta = load(rows.delta + row, Full{});
  const Vec unit = broadcast(scoring.unit);
  const Vec first = lane_keys != nullptr ? load(lane_keys->first + row, Full{}) : broadcast(0.0f);
  const Vec last = lane_keys != nullptr ? load(lane_keys->last + row, Full{}) : broadcast(0.0f);
  const int64_t offset = row / kLanes * kGradKeys * kLanes + row % kLanes;
  const float* scores = tile.scores + offset;
  const float* grad_weights = tile.grad_weights + offset;
  bfloat16* pairs = tile.grad_score_pairs + row / kLanes * kGradKeys * kLanes + row % kLanes / kWidth * 512;
  const auto differentiate = [&](int64_t key) {
    const Vec product = load(scores + key * kLanes, Full{});
    Vec score = product;
    if (!scoring.direct || addends == Addends::kSome)
      score = scoring.finish(product, addends, tile.addends + key * kGradRows + row);
    if (lane_keys != nullptr) score = keep_in_range(score, key, first, last);
    // Subtracted first: of large scores products with the logarithm are too coarse.
    const Vec exponent = (score * unit - lse) * broadcast(kLog2E);
    // Large scores can exceed their logarithm, if it comes from sums in another order. NaN stays.
    const Vec probability = exp2_or_zero({_mm512_min_ps(_mm512_setzero_ps(), exponent.value)});
    // NaN takes part.
    const __mmask16 taking_part = _mm512_cmp_ps_mask(probability.value, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    Vec slope = probability;
    if (scoring.scoring.capped) slope = slope * scoring.scoring.slope(scoring.scoring.cap_ratio(product));
    const Vec difference = load(grad_weights + key * kLanes, Full{}) - delta;
    const Vec gradient = {_mm512_maskz_mul_ps(taking_part, slope.value, difference.value)};
    const auto store_half = [&](bfloat16* place, Vec v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(place + key * kGradRows + row), narrow(v));
    };
    store_half(tile.probabilities, probability);
    store_half(tile.grad_scores, gradient);
    return gradient;
  };
  for (int64_t key = 0; key < keys; key += 2) {
    const Vec even = differentiate(key);
    const Vec odd = differentiate(key + 1);
    _mm512_store_si512(pairs + key / kKeyChunk * 1024 + key % kKeyChunk / 2 * 32, pairs_of(even, odd));
  }
}

// gradients[row][column] += weights[row][k] * rows[k][column] for those elements of rows that are not finite, where a
// weight of 0 takes none; gradients are cut into blocks of 32 columns.
[[gnu::noinline]] void add_infinite_pairs(const RowPointers& rows, const float* finite, int64_t dim, int64_t chunk,
                                          const bfloat16* weights, float* gradients) {
  for (int64_t k = 0; k < kGradRows; ++k) {
    if (finite[k] != 0.0f) continue;
    for (int64_t i = 0; i < dim; ++i) {
      const float element = first_lane(load(rows.rows[k] + i, Partial{1}));
      if (is_finite(element)) continue;
      for (int64_t row = 0; row < kKeyChunk; ++row) {
        const float weight = first_lane(load(weights + (chunk * kKeyChunk + row) * kGradRows + k, Partial{1}));
        if (weight != 0.0f) gradients[i / 32 * (kKeyChunk * 32) + row * 32 + i % 32] += weight * element;
      }
    }
  }
}

inline bool all_finite(const float* finite) {
  Vec least = broadcast(1.0f);
  for (int64_t i = 0; i < kGradRows; i += kWidth) least = least * load(finite + i, Full{});
  return reduce_add(least) == kWidth;
}

// Adds to gradients [chunks, dim / 32, kKeyChunk, 32] the products of weights, [kGradKeys, kGradRows], and rows.
inline void add_row_products(const HeadRows& source, const RowTile& rows, const bfloat16* pairs, const float* finite,
                             int64_t dim, int64_t chunks, const bfloat16* weights, float* gradients) {
  const int64_t steps = ceil_div(rows.rows(), kLanes);
  const int64_t blocks = ceil_div(dim, 32);
  const bool finite_rows = all_finite(finite);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    float* sums = gradients + chunk * kKeyChunk * packed(dim);
    for (int64_t block = 0; block < blocks; ++block) {
      Products::multiply(weights + chunk * kKeyChunk * kGradRows, kGradRows, kLanes, pairs + block * kGradRows * 32,
                         steps, true, sums + block * kKeyChunk * 32);
    }
    if (!finite_rows) add_infinite_pairs(RowPointers(source, rows), finite, dim, chunk, weights, sums);
  }
}

// Probabilities and gradients of scores of a tile of rows and the tile of keys from `key` on. Returns false where no
// key takes part.
bool differentiate_scores(const AttentionProblem& problem, const RowTile& row_tile, int64_t key, const GradRows& rows,
                          GradTile& tile) {
  const int64_t count = smaller(kGradKeys, problem.keys - key);
  const int64_t chunks = ceil_div(count, kKeyChunk);
  const TileKeys tile_keys(problem, row_tile);
  if (!tile_keys.some_have(key, key + count)) return false;
  const Addends addends = fill_addends(problem, row_tile, key, count, kGradRows, tile.addends);
  if (addends == Addends::kNothingLeft) return false;
  LaneKeys lane_keys;
  const bool partial = !tile_keys.all_have(key, key + chunks * kKeyChunk);
  if (partial) fill_lane_keys(problem, row_tile, key, kGradRows, lane_keys);
  const SoftmaxScoring scoring(problem);
  for (int64_t subtile = 0; subtile * kLanes < row_tile.rows(); ++subtile) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t result = (subtile * kGradKeys + chunk * kKeyChunk) * kLanes;
      Products::multiply(tile.keys + chunk * kKeyChunk * tile.dim, tile.dim, 32,
                         rows.queries + subtile * kLanes * tile.dim, tile.dim / 32, false, tile.scores + result);
      Products::multiply(tile.values + chunk * kKeyChunk * tile.value_dim, tile.value_dim, 32,
                         rows.grad + subtile * kLanes * tile.value_dim, tile.value_dim / 32, false,
                         tile.grad_weights + result);
    }
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      differentiate_lanes(scoring, addends, partial ? &lane_keys : nullptr, subtile * kLanes + lane, chunks * kKeyChunk,
                          rows, tile);
    }
  }
  return true;
}

void add_grad_query(const RowTile& row_tile, int64_t chunks, const GradRows& rows, const GradTile& tile) {
  for (int64_t subtile = 0; subtile * kLanes < row_tile.rows(); ++subtile) {
    const bfloat16* pairs = tile.grad_score_pairs + subtile * kGradKeys * kLanes;
    float* sums = rows.grad_query + subtile * tile.dim * kLanes;
    for (int64_t i = 0; i < tile.dim; i += 32) {
      Products::multiply(tile.keys_t + i * kKeyChunk, kKeyChunk, tile.dim * kKeyChunk, pairs, chunks, true,
                         sums + i * kLanes);
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (tile.keys_finite[chunk]) continue;
      add_infinite_elements(tile.keys + chunk * kKeyChunk * tile.dim, tile.dim, kKeyChunk, tile.dim,
                            pairs + chunk * 1024, sums);
    }
  }
}

// Rows of gradients that are cut into blocks of 32 columns.
inline void store_blocks(const float* sums, float factor, int64_t chunk_size, int64_t count, int64_t dim,
                         bfloat16* gradients) {
  for (int64_t row = 0; row < count; ++row) {
    const float* chunk = sums + row / kKeyChunk * chunk_size + row % kKeyChunk * 32;
    for (int64_t column = 0; column < dim; column += 32) {
      for_each_vector(smaller(32, dim - column), [&](int64_t i, auto lanes) {
        store(gradients + row * dim + column + i, load(chunk + column * kKeyChunk + i, lanes) * broadcast(factor),
              lanes);
      });
    }
  }
}

// A key head and what is kept of its rows.
struct GradHead {
  GradHead(const AttentionBackwardArgs& args, int64_t index, float* memory)
      : problem(args.problem),
        batch(index / problem.key_heads),
        key_head(index % problem.key_heads),
        first_key(index * problem.keys),
        tiles(row_tiles_of(problem, kGradRows).count),
        memory(memory),
        rows_size(GradRows(problem, nullptr).size) {}

  RowTile tile(int64_t index) const { return row_tile(problem, kGradRows, batch, key_head, index); }
  GradRows rows(int64_t index) const { return GradRows(problem, memory + index * rows_size); }

  const AttentionProblem& problem;
  int64_t batch;
  int64_t key_head;
  int64_t first_key;  // among those of all key heads
  int64_t tiles;
  float* memory;
  int64_t rows_size;
};

// Gradients of keys and values of a tile of keys; those of queries are added up if it is asked for.
void differentiate_keys(const AttentionBackwardArgs& args, const GradHead& head, int64_t key, bool queries_too,
                        GradTile& tile) {
  const AttentionProblem& problem = args.problem;
  const int64_t count = smaller(kGradKeys, problem.keys - key);
  const int64_t chunks = ceil_div(count, kKeyChunk);
  load_grad_keys(problem, head.batch, head.key_head, key, tile);
  clear(tile.grad_keys, kGradKeys * tile.dim);
  clear(tile.grad_values, kGradKeys * tile.value_dim);
  for (int64_t index = 0; index < head.tiles; ++index) {
    const RowTile row_tile = head.tile(index);
    const GradRows rows = head.rows(index);
    if (!differentiate_scores(problem, row_tile, key, rows, tile)) continue;
    if (args.grad_value != nullptr) {
      add_row_products(args.grad, row_tile, rows.grad_pairs, rows.grad_finite, problem.value_dim, chunks,
                       tile.probabilities, tile.grad_values);
    }
    if (args.grad_key != nullptr) {
      add_row_products(problem.query, row_tile, rows.query_pairs, rows.queries_finite, problem.head_dim, chunks,
                       tile.grad_scores, tile.grad_keys);
    }
    if (queries_too) add_grad_query(row_tile, chunks, rows, tile);
  }
  const int64_t first = head.first_key + key;
  if (args.grad_key != nullptr) {
    store_blocks(tile.grad_keys, problem.scale, kKeyChunk * tile.dim, count, problem.head_dim,
                 static_cast<bfloat16*>(args.grad_key) + first * problem.head_dim);
  }
  if (args.grad_value != nullptr) {
    store_blocks(tile.grad_values, 1.0f, kKeyChunk * tile.value_dim, count, problem.value_dim,
                 static_cast<bfloat16*>(args.grad_value) + first * problem.value_dim);
  }
}

void store_grad_query(const AttentionBackwardArgs& args, const GradHead& head, int64_t index, GradTile& tile) {
  const AttentionProblem& problem = args.problem;
  const RowTile row_tile = head.tile(index);
  const GradRows rows = head.rows(index);
  // Those of keys are stored.
  float* gradients = tile.grad_keys;
  for (int64_t subtile = 0; subtile * kLanes < row_tile.rows(); ++subtile) {
    transpose_rows(rows.grad_query + subtile * tile.dim * kLanes, kLanes, tile.dim, kLanes,
                   gradients + subtile * kLanes * tile.dim, tile.dim);
  }
  for_each_row(row_tile, [&](int64_t row, int64_t query_head, int64_t query) {
    store_row(
        gradients + row * tile.dim, problem.scale, problem.head_dim,
        static_cast<bfloat16*>(args.grad_query) + row_index(problem, head.batch, query_head, query) * problem.head_dim);
  });
}

}  // namespace

int64_t attention_grad_rows_size(const AttentionProblem& problem) {
  return row_tiles_of(problem, kGradRows).count * GradRows(problem, nullptr).size;
}

int64_t attention_grad_scratch(const AttentionProblem& problem) { return GradTile(problem, nullptr).size; }

void attention_grad_heads(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  [[maybe_unused]] const Products::Session session;
  GradTile tile(args.problem, scratch);
  for (int64_t unit = begin; unit < end; ++unit) {
    const GradHead head(args, unit, scratch + tile.size);
    for (int64_t index = 0; index < head.tiles; ++index) load_grad_rows(args, head.tile(index), head.rows(index));
    const bool queries_too = args.grad_query != nullptr;
    for (int64_t key = 0; key < args.problem.keys; key += kGradKeys) {
      differentiate_keys(args, head, key, queries_too, tile);
    }
    for (int64_t index = 0; queries_too && index < head.tiles; ++index) store_grad_query(args, head, index, tile);
  }
}

void attention_grad_rows(const AttentionBackwardArgs& args, float*, int64_t begin, int64_t end) {
  [[maybe_unused]] const Products::Session session;
  const GradHead head(args, args.shared_head, args.shared_rows);
  for (int64_t index = begin; index < end; ++index) load_grad_rows(args, head.tile(index), head.rows(index));
}

void attention_grad_keys(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  [[maybe_unused]] const Products::Session session;
  GradTile tile(args.problem, scratch);
  const GradHead head(args, args.shared_head, args.shared_rows);
  for (int64_t index = begin; index < end; ++index) differentiate_keys(args, head, index * kGradKeys, false, tile);
}

void attention_grad_queries(const AttentionBackwardArgs& args, float* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  [[maybe_unused]] const Products::Session session;
  GradTile tile(problem, scratch);
  const GradHead head(args, args.shared_head, args.shared_rows);
  for (int64_t index = begin; index < end; ++index) {
    const RowTile row_tile = head.tile(index);
    const GradRows rows = head.rows(index);
    for (int64_t key = 0; key < problem.keys; key += kGradKeys) {
      const int64_t count = smaller(kGradKeys, problem.keys - key);
      if (!TileKeys(problem, row_tile).some_have(key, key + count)) continue;
      load_grad_keys(problem, head.batch, head.key_head, key, tile);
      if (!differentiate_scores(problem, row_tile, key, rows, tile)) continue;
      add_grad_query(row_tile, ceil_div(count, kKeyChunk), rows, tile);
    }
    store_grad_query(args, head, index, tile);
  }
}

}  // namespace rudnn::RUDNN_ISA
