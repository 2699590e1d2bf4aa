// The gradients of attention. Probabilities are computed again from the log-sum-exp.
#pragma once

#include "common/compensated_sum.h"
#include "cuda/scalar_machine.cuh"
#include "cuda/walk.cuh"

namespace rudnn {

struct RowSums {
  float lse;
  float delta;
};

__device__ __forceinline__ RowSums row_sums(const AttentionArgs& args, const QueryRow& row) {
  if (!row.exists) return {0.0f, 0.0f};
  return {args.known_lse[row.index], args.delta[row.index]};
}

// The gradient of a score with its addends, given that of its probability less delta. What is excluded has none,
// whatever that is.
__device__ __forceinline__ float score_gradient(float score, const RowSums& row, float grad) {
  return score == -INFINITY ? 0.0f : exponential_of_difference(score, row.lse) * grad;
}

template <class Machine>
class GradQuery : public QueryRole<Machine> {
  using Base = QueryRole<Machine>;
  using T = typename Machine::Element;
  using Base::args_, Base::column_, Base::rows_, Base::tile_;

 public:
  static constexpr int kProducts = 2;

  __device__ __forceinline__ explicit GradQuery(const AttentionArgs& args)
      : GradQuery(args, BlockPlace(slices(args), tiles(args), args.key_heads)) {}

  static __host__ __device__ int64_t slices(const AttentionArgs& args) {
    return (args.head_dim + Machine::kColumns - 1) / Machine::kColumns;
  }
  static __host__ __device__ int64_t tiles(const AttentionArgs& args) {
    return RowTiling<Machine::kRows>(args.group(), args.window.queries).tiles;
  }

  template <int kProduct>
  __device__ __forceinline__ auto stationary() const {
    return kProduct == 0 ? this->rows_of_heads(args_.query, args_.head_dim)
                         : this->rows_of_heads(args_.grad, args_.value_dim);
  }
  template <int kProduct>
  __device__ __forceinline__ auto streamed(int64_t key) const {
    return kProduct == 0 ? this->rows_of_keys(args_.key, args_.head_dim, key, 0)
                         : this->rows_of_keys(args_.value, args_.value_dim, key, 0);
  }
  __device__ __forceinline__ auto summed(int64_t key) const {
    return this->rows_of_keys(args_.key, args_.head_dim, key, column_);
  }

  __device__ __forceinline__ bool weigh(int64_t key, typename Machine::Scores& scores,
                                        typename Machine::Scores& grads) {
    const bool excluding = this->excludes(key);
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j)
        grads.at(i, j) = (grads.at(i, j) - sums_[i].delta) * score_slope(scores.at(i, j), args_.softcap);
      if (excluding) this->complete(i, key, scores);
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j)
        scores.at(i, j) = score_gradient(scores.at(i, j), sums_[i], grads.at(i, j));
    }
    return excluding;
  }

  __device__ __forceinline__ void finish(typename Machine::Result& result) {
    Machine::scale(result, [&](int) { return args_.scale; });
    Machine::for_each_run(result, [&](int i, int column, const auto& run) {
      if (!rows_[i].exists) return;
      store_run(static_cast<T*>(args_.grad_query) + rows_[i].index * args_.head_dim, column_ + column, args_.head_dim,
                run, args_.vectors);
    });
  }

 private:
  __device__ __forceinline__ GradQuery(const AttentionArgs& args, const BlockPlace& place)
      : Base(args, place, tiles(args) - 1 - place.tile, 0, args.window.keys) {
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) sums_[i] = row_sums(args, rows_[i]);
  }

  RowSums sums_[Machine::kThreadRows];
};

// Of the roles whose stationary rows are keys, and whose streamed ones are tiles of those of queries.
template <class Machine>
class KeyRole {
  using T = typename Machine::Element;

 public:
  static __host__ __device__ int64_t tiles(const AttentionArgs& args) {
    return (args.window.keys + Machine::kRows - 1) / Machine::kRows;
  }

  __device__ __forceinline__ const AttentionArgs& args() const { return args_; }
  __device__ __forceinline__ bool vectors() const { return args_.vectors; }
  __device__ __forceinline__ int64_t first() const { return next(-1); }
  __device__ __forceinline__ int64_t last() const { return tiling_.tiles; }
  __device__ __forceinline__ int64_t next(int64_t index) const {
    do ++index;
    while (index < tiling_.tiles && !meets(tile_at(index)));
    return index;
  }

 protected:
  __device__ __forceinline__ KeyRole(const AttentionArgs& args, const BlockPlace& place)
      : args_(args),
        tiling_(args.group(), args.window.queries),
        batch_(place.batch),
        key_head_(place.key_head),
        key_(place.tile * Machine::kRows),
        column_(place.slice * Machine::kColumns) {}

  __device__ __forceinline__ RowTile tile_at(int64_t index) const {
    return row_tile<kStreamed>(args_, batch_, key_head_, index);
  }
  __device__ __forceinline__ bool meets(const RowTile& tile) const {
    return TileKeys::of<kStreamed>(args_, tile).some_have(key_, Machine::kRows) &&
           mask_leaves_some<kStreamed>(args_, tile, key_);
  }
  __device__ __forceinline__ bool excludes(const RowTile& tile) const {
    const TileKeys keys = TileKeys::of<kStreamed>(args_, tile);
    return args_.mask.exists() || args_.bias.exists() || !keys.full || !keys.all_have(key_, Machine::kRows);
  }
  __device__ __forceinline__ auto rows_of_keys(const HeadRows& source, int64_t columns) const {
    return slice(keys_of<T>(source, batch_, key_head_, args_.window.keys, columns), key_, 0);
  }
  __device__ __forceinline__ auto rows_of_heads(const HeadRows& source, int64_t columns, int64_t index,
                                                int64_t column) const {
    const RowTile tile = tile_at(index);
    return slice(rows_of<T>(source, tile, columns), tile.first, column);
  }

  // Calls before(i, j, sums of its row) for the scores of the thread, then adds their addends, and calls
  // after(i, j, sums). Returns whether keys may be excluded.
  template <class Before, class After>
  __device__ __forceinline__ bool complete(int64_t index, typename Machine::Scores& scores, Before before,
                                           After after) const {
    const RowTile tile = tile_at(index);
    const bool excluding = excludes(tile);
#pragma unroll
    for (int j = 0; j < Machine::kThreadColumns; ++j) {
      const QueryRow row = query_row(args_, tile, Machine::column(j));
      const RowSums sums = row_sums(args_, row);
#pragma unroll
      for (int i = 0; i < Machine::kThreadRows; ++i) before(i, j, sums);
      if (excluding)
        ScoreRow(args_, batch_, row, key_)
            .template complete<T, Machine::kThreadRows>(
                args_, [&](int i) -> float& { return scores.at(i, j); }, [](int i) { return Machine::row(i); });
#pragma unroll
      for (int i = 0; i < Machine::kThreadRows; ++i) after(i, j, sums);
    }
    return excluding;
  }

  __device__ __forceinline__ void store(void* gradients, int64_t width, typename Machine::Result& result) const {
    T* const first =
        static_cast<T*>(gradients) + ((batch_ * args_.key_heads + key_head_) * args_.window.keys + key_) * width;
    Machine::for_each_run(result, [&](int i, int column, const auto& run) {
      const int row = Machine::row(i);
      if (key_ + row < args_.window.keys) store_run(first + row * width, column_ + column, width, run, args_.vectors);
    });
  }

  const AttentionArgs& args_;
  RowTiling<kStreamed> tiling_;
  int64_t batch_;
  int64_t key_head_;
  int64_t key_;
  int64_t column_;  // of the result
};

template <class Machine>
class GradKey : public KeyRole<Machine> {
  using Base = KeyRole<Machine>;
  using Base::args_, Base::column_;

 public:
  static constexpr int kProducts = 2;

  __device__ __forceinline__ explicit GradKey(const AttentionArgs& args)
      : Base(args, BlockPlace(slices(args), Base::tiles(args), args.key_heads)) {}

  static __host__ __device__ int64_t slices(const AttentionArgs& args) {
    return (args.head_dim + Machine::kColumns - 1) / Machine::kColumns;
  }

  template <int kProduct>
  __device__ __forceinline__ auto stationary() const {
    return kProduct == 0 ? this->rows_of_keys(args_.key, args_.head_dim)
                         : this->rows_of_keys(args_.value, args_.value_dim);
  }
  template <int kProduct>
  __device__ __forceinline__ auto streamed(int64_t index) const {
    return kProduct == 0 ? this->rows_of_heads(args_.query, args_.head_dim, index, 0)
                         : this->rows_of_heads(args_.grad, args_.value_dim, index, 0);
  }
  __device__ __forceinline__ auto summed(int64_t index) const {
    return this->rows_of_heads(args_.query, args_.head_dim, index, column_);
  }

  __device__ __forceinline__ bool weigh(int64_t index, typename Machine::Scores& scores,
                                        typename Machine::Scores& grads) {
    const auto before = [&](int i, int j, const RowSums& row) {
      grads.at(i, j) = (grads.at(i, j) - row.delta) * score_slope(scores.at(i, j), args_.softcap);
    };
    return this->complete(index, scores, before, [&](int i, int j, const RowSums& row) {
      scores.at(i, j) = score_gradient(scores.at(i, j), row, grads.at(i, j));
    });
  }

  __device__ __forceinline__ void finish(typename Machine::Result& result) {
    Machine::scale(result, [&](int) { return args_.scale; });
    this->store(args_.grad_key, args_.head_dim, result);
  }
};

template <class Machine>
class GradValue : public KeyRole<Machine> {
  using Base = KeyRole<Machine>;
  using Base::args_, Base::column_;

 public:
  static constexpr int kProducts = 1;

  __device__ __forceinline__ explicit GradValue(const AttentionArgs& args)
      : Base(args, BlockPlace(slices(args), Base::tiles(args), args.key_heads)) {}

  static __host__ __device__ int64_t slices(const AttentionArgs& args) {
    return (args.value_dim + Machine::kColumns - 1) / Machine::kColumns;
  }

  template <int>
  __device__ __forceinline__ auto stationary() const {
    return this->rows_of_keys(args_.key, args_.head_dim);
  }
  template <int>
  __device__ __forceinline__ auto streamed(int64_t index) const {
    return this->rows_of_heads(args_.query, args_.head_dim, index, 0);
  }
  __device__ __forceinline__ auto summed(int64_t index) const {
    return this->rows_of_heads(args_.grad, args_.value_dim, index, column_);
  }

  __device__ __forceinline__ bool weigh(int64_t index, typename Machine::Scores& scores, typename Machine::Result&) {
    const auto nothing = [](int, int, const RowSums&) {};
    return this->complete(index, scores, nothing, [&](int i, int j, const RowSums& row) {
      scores.at(i, j) = exponential_of_difference(scores.at(i, j), row.lse);
    });
  }

  __device__ __forceinline__ void finish(typename Machine::Result& result) {
    this->store(args_.grad_value, args_.value_dim, result);
  }
};

// The sums of grad * output of a row, one thread for each. Terms are added in the order of the products of grad and
// values on the float32 units: of a single key the two are the same. An output of 0 may be that of a row without keys,
// whose gradient does not show.
constexpr int kDeltaThreads = 128;
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) sum_delta(AttentionArgs args) {
  constexpr int kTerms = ScalarMachine<T, kStreamed>::kTerms, kVector = 16 / sizeof(T);
  const int64_t index = int64_t{blockIdx.x} * kDeltaThreads + threadIdx.x, width = args.value_dim;
  if (index >= args.rows()) return;
  const int64_t query = index % args.window.queries, head = index / args.window.queries % args.heads;
  const int64_t batch = index / args.window.queries / args.heads;
  const auto row_of = [&](const HeadRows& source) {
    return head_data<T>(source, batch, head) + query * source.row_stride;
  };
  const T* const grads = row_of(args.grad);
  const T* const outputs = row_of(args.forward_output);
  const auto load = [&](const T* row, int64_t column) {
    return args.vectors && column < width ? load_vec<kVector>(row + column) : load_ragged<kVector>(row, column, width);
  };
  float delta = 0.0f;
  for (int64_t first = 0; first < width; first += kTerms) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTerms; i += kVector) {
      const auto grad = load(grads, first + i), output = load(outputs, first + i);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float factor = to_float(output[j]);
        if (factor != 0.0f) sum = fmaf(to_float(grad[j]), factor, sum);
      }
    }
    delta += sum;
  }
  args.delta[index] = delta;
}

// A tile of the gradient of the bias: the sum of the gradients of scores over the axes that the bias does not have.
template <class Machine>
class GradBias {
  using T = typename Machine::Element;

 public:
  static __host__ __device__ int64_t tiles(const AttentionArgs& args) {
    const auto& shape = args.bias_shape;
    return shape[0] * shape[1] * ((shape[2] + kStreamed - 1) / kStreamed) * ((shape[3] + kStreamed - 1) / kStreamed);
  }

  __device__ __forceinline__ explicit GradBias(const AttentionArgs& args) : args_(args) {
    const auto& shape = args.bias_shape;
    int64_t rest = blockIdx.x;
    const auto take = [&](int64_t count) {
      const int64_t part = rest % count;
      rest /= count;
      return part;
    };
    key_ = take((shape[3] + kStreamed - 1) / kStreamed) * kStreamed;
    query_ = take((shape[2] + kStreamed - 1) / kStreamed) * kStreamed;
    head_ = take(shape[1]);
    batch_ = rest;
  }

  __device__ __forceinline__ bool vectors() const { return args_.vectors; }
  template <int kProduct>
  __device__ __forceinline__ auto stationary() const {
    return kProduct == 0 ? slice(rows_of<T>(args_.query, tile_, args_.head_dim), tile_.first, 0)
                         : slice(rows_of<T>(args_.grad, tile_, args_.value_dim), tile_.first, 0);
  }
  template <int kProduct>
  __device__ __forceinline__ auto streamed(int64_t key) const {
    const int64_t key_head = tile_.head / args_.group(), keys = args_.window.keys;
    return kProduct == 0 ? slice(keys_of<T>(args_.key, tile_.batch, key_head, keys, args_.head_dim), key, 0)
                         : slice(keys_of<T>(args_.value, tile_.batch, key_head, keys, args_.value_dim), key, 0);
  }

  __device__ __forceinline__ void run(unsigned char* shared) {
    const int64_t queries = args_.window.queries, keys = args_.window.keys;
    Machine machine(*this, shared);
    for_each(0, batch_, 1, args_.batch, [&](int64_t batch) {
      for_each(1, head_, 1, args_.heads, [&](int64_t head) {
        for_each(2, query_, kStreamed, queries, [&](int64_t query) {
          tile_ = {batch, head, 1, query, queries};
          const TileKeys tile_keys = TileKeys::of<kStreamed>(args_, tile_);
          for_each(3, key_, kStreamed, keys, [&](int64_t key) {
            if (tile_keys.some_have(key, kStreamed) && mask_leaves_some<kStreamed>(args_, tile_, key))
              add(machine, key);
          });
        });
      });
    });
    __syncthreads();  // the last products are done with
    store(reinterpret_cast<float*>(shared));
  }

 private:
  __device__ __forceinline__ bool has(int axis) const {
    const int64_t lengths[4] = {args_.batch, args_.heads, args_.window.queries, args_.window.keys};
    return args_.bias_shape[axis] == lengths[axis];
  }
  // Of an axis that the bias has, one position or tile; of another, all.
  template <class Visit>
  __device__ __forceinline__ void for_each(int axis, int64_t own, int64_t step, int64_t length, Visit visit) const {
    if (has(axis))
      visit(own);
    else
      for (int64_t position = 0; position < length; position += step) visit(position);
  }

  __device__ __forceinline__ void add(Machine& machine, int64_t key) {
    typename Machine::Scores scores, grads;
    machine.template multiply<0>(*this, key, scores);
    machine.template multiply<1>(*this, key, grads);
    score_products<Machine>(args_, scores);
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) {
      const QueryRow row = query_row(args_, tile_, Machine::row(i));
      const RowSums sums = row_sums(args_, row);
      ScoreRow(args_, tile_.batch, row, key)
          .template complete<T, Machine::kThreadColumns>(
              args_, [&](int j) -> float& { return scores.at(i, j); }, [](int j) { return Machine::column(j); });
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j)
        sums_[i][j] = added(sums_[i][j], score_gradient(scores.at(i, j), sums, grads.at(i, j) - sums.delta));
    }
  }

  // Sums over the axes of the tile that the bias does not have, and stores what is left.
  __device__ __forceinline__ void store(float* shared) const {
    constexpr int kPitch = kStreamed + 1;
    float* const values = shared;
    float* const lost = shared + kStreamed * kPitch;
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j) {
        values[Machine::row(i) * kPitch + Machine::column(j)] = sums_[i][j].value;
        lost[Machine::row(i) * kPitch + Machine::column(j)] = sums_[i][j].lost;
      }
    __syncthreads();
    const int64_t rows = args_.bias_shape[2], columns = args_.bias_shape[3];
    const int row_count = has(2) ? static_cast<int>(min(rows - query_, int64_t{kStreamed})) : 1;
    const int column_count = has(3) ? static_cast<int>(min(columns - key_, int64_t{kStreamed})) : 1;
    for (int element = threadIdx.x; element < row_count * column_count; element += Machine::kThreads) {
      const int row = element / column_count, column = element % column_count;
      CompensatedSum sum = {0.0f, 0.0f};
      for (int i = has(2) ? row : 0; i < (has(2) ? row + 1 : kStreamed); ++i)
        for (int j = has(3) ? column : 0; j < (has(3) ? column + 1 : kStreamed); ++j)
          sum = added(sum, CompensatedSum{values[i * kPitch + j], lost[i * kPitch + j]});
      const int64_t position = ((batch_ * args_.bias_shape[1] + head_) * rows + query_ + row) * columns + key_ + column;
      store_as(args_.bias.elements.dtype, args_.grad_bias, position, rounded(sum));
    }
  }

  const AttentionArgs& args_;
  int64_t batch_;
  int64_t head_;
  int64_t query_;
  int64_t key_;
  RowTile tile_;
  CompensatedSum sums_[Machine::kThreadRows][Machine::kThreadColumns] = {};
};

template <class Machine>
__global__ void __launch_bounds__(Machine::kThreads, Machine::kLeastBlocks) grad_bias_kernel(AttentionArgs args) {
  DYNAMIC_SHARED(shared);
  GradBias<Machine>(args).run(shared);
}

// The gradient of a head's sink, a block for each.
constexpr int kSinkThreads = 256;
template <int kThreads>
__global__ void __launch_bounds__(kThreads) grad_sinks_kernel(AttentionArgs args) {
  __shared__ float values[kThreads], lost[kThreads];
  const int64_t head = blockIdx.x, queries = args.window.queries;
  const float sink = args.sinks[head];
  CompensatedSum sum = {0.0f, 0.0f};
  if (sink != -INFINITY)
    for (int64_t i = threadIdx.x; i < args.batch * queries; i += kThreads) {
      const int64_t row = (i / queries * args.heads + head) * queries + i % queries;
      sum = added(sum, -exponential_of_difference(sink, args.known_lse[row]) * args.delta[row]);
    }
  values[threadIdx.x] = sum.value;
  lost[threadIdx.x] = sum.lost;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < kThreads; ++thread) sum = added(sum, CompensatedSum{values[thread], lost[thread]});
  store_as(args.sinks.dtype, args.grad_sinks, head, rounded(sum));
}

}  // namespace rudnn
