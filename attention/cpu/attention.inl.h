// Attention in one pass over tiles of keys with a running softmax, in float32, for any vector width.
#include "cpu/attention_tiles.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// The memory of a tile of rows.
struct ForwardMemory {
  ForwardMemory(const AttentionProblem& problem, float* memory)
      : dim(round_up(problem.head_dim, kWidth)), value_dim(round_up(problem.value_dim, kWidth)) {
    Scratch scratch(memory);
    queries = scratch.take(dim * kRowTile);
    keys = scratch.take(kKeyTile * dim);
    values = scratch.take(kKeyTile * value_dim);
    scores = scratch.take(kKeyTile * kRowTile);
    addends = scratch.take(kKeyTile * kRowTile);
    query_rows = scratch.take(kRowTile * dim);
    output = scratch.take(kRowTile * value_dim);
    maximum = scratch.take(kRowTile);
    sum = scratch.take(kRowTile);
    correction = scratch.take(kRowTile);
    size = scratch.taken();
  }

  int64_t dim;
  int64_t value_dim;
  float* queries;     // [D, width]
  float* keys;        // [kKeyTile, D]
  float* values;      // [kKeyTile, Dv]
  float* scores;      // [kKeyTile, width]
  float* addends;     // [kKeyTile, width]
  float* query_rows;  // [width, D]
  float* output;      // [rows, Dv]
  float* maximum;     // of the scores so far
  float* sum;         // of the weights so far, which are relative to the maximum
  float* correction;  // what the maximum's change makes of earlier weights
  int64_t size;
};

// From products to scores with the addends.
inline void finish_scores(const SoftmaxScoring& scoring, Addends addends, int64_t count, int64_t width,
                          ForwardMemory& memory) {
  if (scoring.direct && addends == Addends::kNone) return;
  for (int64_t i = 0; i < count * width; i += kWidth) {
    store(memory.scores + i, scoring.finish(load(memory.scores + i, Full{}), addends, memory.addends + i), Full{});
  }
}

// The same with the terms of a bias, whose keys are neighbours.
template <class T>
inline void finish_scores(const Scoring& scoring, const OperandRows& bias, int64_t key, int64_t count,
                          ForwardMemory& memory) {
  const int64_t width = bias.lanes();
  for_each_transposed<T>(bias, key, count, [&](int64_t i, int64_t lane, const Vec(&terms)[kWidth]) {
    float* const scores = memory.scores + i * width + lane;
    for (int k = 0; k < kWidth; ++k) {
      store(scores + k * width, scoring.score(load(scores + k * width, Full{}), terms[k]), Full{});
    }
  });
}

// From scores to weights, relative to the new maximum.
inline void update_softmax(const SoftmaxScoring& scoring, const LaneKeys* lane_keys, int64_t count, int64_t width,
                           ForwardMemory& memory) {
  for (int64_t lane = 0; lane < width; lane += kWidth) {
    float* const scores = memory.scores + lane;
    if (lane_keys != nullptr) {
      const Vec first = load(lane_keys->first + lane, Full{});
      const Vec last = load(lane_keys->last + lane, Full{});
      for (int64_t key = 0; key < count; ++key) {
        store(scores + key * width, keep_in_range(load(scores + key * width, Full{}), key, first, last), Full{});
      }
    }
    const Vec old_maximum = load(memory.maximum + lane, Full{});
    const Vec maximum = max(max_of_column(scores, count, width), old_maximum);
    const Vec base = where_less(maximum, broadcast(kLowest), broadcast(0.0f), maximum);
    const Vec factor = broadcast(scoring.factor);
    const Vec correction = exp2_of_product(old_maximum - base, factor);
    const auto weigh = [&](int64_t key) {
      const Vec weight = exp2_of_product(load(scores + key * width, Full{}) - base, factor);
      store(scores + key * width, weight, Full{});
      return weight;
    };
    // Two sums, since each addition waits for the one before it.
    Vec even = broadcast(0.0f);
    Vec odd = even;
    int64_t key = 0;
    for (; key + 2 <= count; key += 2) {
      even = even + weigh(key);
      odd = odd + weigh(key + 1);
    }
    if (key < count) even = even + weigh(key);
    store(memory.maximum + lane, maximum, Full{});
    store(memory.correction + lane, correction, Full{});
    store(memory.sum + lane, fma(load(memory.sum + lane, Full{}), correction, even + odd), Full{});
  }
}

inline void correct_output(int64_t rows, ForwardMemory& memory) {
  for (int64_t row = 0; row < rows; ++row) {
    if (memory.correction[row] == 1.0f) continue;
    const Vec correction = broadcast(memory.correction[row]);
    float* output = memory.output + row * memory.value_dim;
    for (int64_t i = 0; i < memory.value_dim; i += kWidth) {
      store(output + i, correction * load(output + i, Full{}), Full{});
    }
  }
}

// Attends from the rows of a tile to keys [first_key, last_key). A key that is excluded does not show even if its value
// is not finite where `values_finite` is false; where it is true, such a value makes the output NaN.
template <class T>
void attend(const AttentionProblem& problem, const RowTile& tile, int64_t first_key, int64_t last_key, bool with_sinks,
            bool values_finite, ForwardMemory& memory) {
  const int64_t rows = tile.rows();
  const int64_t width = round_up(rows, kWidth);
  const SoftmaxScoring scoring(problem);
  const TileKeys tile_keys(problem, tile);
  load_columns<T>(problem.query, tile, problem.head_dim, memory.dim, width, memory.query_rows, memory.queries);
  clear(memory.output, round_up(rows, kProductRows) * memory.value_dim);
  start_lanes(problem, tile, with_sinks, scoring.unit, width, {memory.maximum, memory.sum});
  const T* keys = rows_of<T>(problem.key, tile.batch, tile.key_head);
  const T* values = rows_of<T>(problem.value, tile.batch, tile.key_head);
  const int64_t begin = larger(first_key, tile_keys.first() / kKeyTile * kKeyTile);
  const int64_t end = smaller(last_key, tile_keys.last());
  const OperandRows bias_rows(problem.bias, bias_bytes(problem), tile, width);
  const bool adds_bias_rows = problem.mask.data == nullptr && has_rows_of_keys(problem.bias, tile);
  ComingBias coming_bias(problem, bias_rows, adds_bias_rows);
  const FetchBias fetch_bias = {coming_bias};
  for (int64_t key = begin; key < end; key += kKeyTile) {
    const int64_t count = smaller(kKeyTile, end - key);
    Addends addends = Addends::kNone;
    if (adds_bias_rows) {
      if (!any_left(bias_rows, problem.bias_dtype, key, count)) continue;
    } else {
      addends = fill_addends(problem, tile, key, count, width, memory.addends);
      if (addends == Addends::kNothingLeft) continue;
    }
    LaneKeys lane_keys;
    const bool partial = !tile_keys.all_have(key, key + count);
    if (partial) fill_lane_keys(problem, tile, key, width, lane_keys);

    const FloatRows key_rows = float_rows(keys + key * problem.key.row_stride, problem.key.row_stride, count,
                                          problem.head_dim, memory.keys, memory.dim);
    const FloatRows value_rows = float_rows(values + key * problem.value.row_stride, problem.value.row_stride, count,
                                            problem.value_dim, memory.values, memory.value_dim);
    // Both products pause at least once for so many rows of theirs.
    coming_bias.start(key + kKeyTile, smaller(kKeyTile, end - key - kKeyTile),
                      ceil_div(count, kProductRows) + ceil_div(rows, kProductRows));
    multiply(Left<false>{key_rows.data, key_rows.stride}, count, memory.queries, width, width, problem.head_dim, false,
             memory.scores, width, fetch_bias);
    if (adds_bias_rows) {
      visit_dtype(problem.bias_dtype, [&](auto element) {
        finish_scores<typename decltype(element)::type>(scoring.scoring, bias_rows, key, count, memory);
      });
    } else {
      finish_scores(scoring, addends, count, width, memory);
    }
    update_softmax(scoring, partial ? &lane_keys : nullptr, count, width, memory);
    correct_output(rows, memory);
    add_product(Left<true>{memory.scores, width}, rows, value_rows.data,
                values_finite || all_finite(value_rows, count, memory.value_dim), value_rows.stride, memory.value_dim,
                count, memory.output, memory.value_dim, fetch_bias);
  }
  finish_lanes(scoring.unit, width, {memory.maximum, memory.sum});
}

// Adds up the splits of a row in their order.
template <class T>
void merge_row(const AttentionArgs& args, int64_t index, float* sums) {
  const AttentionProblem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  const int64_t dim = problem.value_dim;
  const float sink = problem.sinks == nullptr ? -kInfinity : problem.sinks[index / problem.queries % problem.heads];
  float maximum = sink;
  for (int64_t split = 0; split < args.splits; ++split) {
    const float other = args.split_maximum[split * rows + index];
    maximum = other > maximum ? other : maximum;
  }
  const float base = maximum < kLowest ? 0.0f : maximum;
  float sum = first_lane(exp(broadcast(sink - base)));
  clear(sums, round_up(dim, kWidth));
  for (int64_t split = 0; split < args.splits; ++split) {
    const int64_t part = split * rows + index;
    if (args.split_sum[part] == 0.0f) continue;
    const float weight = first_lane(exp(broadcast(args.split_maximum[part] - base)));
    sum += weight * args.split_sum[part];
    for_each_vector(dim, [&](int64_t i, auto lanes) {
      store(sums + i, fma(broadcast(weight), load(args.split_output + part * dim + i, lanes), load(sums + i, lanes)),
            lanes);
    });
  }
  args.lse[index] = lse_of(maximum, sum);
  store_row(sums, mean_factor(sum), dim, static_cast<T*>(args.output) + index * dim);
}

}  // namespace

int64_t attention_scratch(const AttentionProblem& problem) { return ForwardMemory(problem, nullptr).size; }

void attention_tiles(const AttentionArgs& args, float* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& problem = args.problem;
  ForwardMemory memory(problem, scratch);
  const int64_t tiles = row_tiles_of(problem, kRowTile).count;
  visit_dtype(problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t split = unit % args.splits;
      const int64_t index = unit / args.splits;
      const int64_t head = index / tiles;
      const RowTile tile =
          row_tile(problem, kRowTile, head / problem.key_heads, head % problem.key_heads, index % tiles);
      const auto attend_to_split = [&](bool values_finite) {
        attend<T>(problem, tile, split * args.split_keys, (split + 1) * args.split_keys, args.splits == 1,
                  values_finite, memory);
      };
      attend_to_split(true);
      if (!all_finite({memory.output, memory.value_dim}, tile.rows(), memory.value_dim)) attend_to_split(false);
      // Weights are not rounded.
      store_results<T>(args, tile, split, memory.output, memory.value_dim, memory.maximum, memory.sum, memory.sum);
    }
  });
}

void attention_merge(const AttentionArgs& args, float* scratch, int64_t begin, int64_t end) {
  visit_dtype(args.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for (int64_t row = begin; row < end; ++row) merge_row<T>(args, row, scratch);
  });
}

}  // namespace rudnn::RUDNN_ISA
