// attention: the running softmax of the scores of a tile of rows, times the values.
#pragma once

#include "cuda/walk.cuh"

namespace rudnn {

// A sum of weights that are relative to the largest score.
struct SoftmaxSum {
  float maximum;
  float sum;
};

// The largest of the scores, and then the weights of the others relative to it, are those of the keys and of the sink.
__device__ __forceinline__ SoftmaxSum sum_of_sink(const AttentionArgs& args, int64_t head) {
  const float sink = args.sinks.data != nullptr ? args.sinks[head] : -INFINITY;
  return {sink, sink == -INFINITY ? 0.0f : 1.0f};
}

// What the sum of weighted values is to be multiplied by. A row without keys has none, and comes out 0.
__device__ __forceinline__ float factor_of(const SoftmaxSum& softmax) {
  return softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;
}
__device__ __forceinline__ float lse_of(const SoftmaxSum& softmax) {
  return softmax_base(softmax.maximum) + natural_logarithm(softmax.sum);
}

template <class Machine>
class Forward : public QueryRole<Machine> {
  using Base = QueryRole<Machine>;
  using T = typename Machine::Element;
  using Base::args_, Base::column_, Base::rows_, Base::tile_;

 public:
  static constexpr int kProducts = 1;

  __device__ __forceinline__ explicit Forward(const AttentionArgs& args)
      : Forward(args, BlockPlace(slices(args), tiles(args), args.key_heads)) {}

  static __host__ __device__ int64_t slices(const AttentionArgs& args) {
    return (args.value_dim + Machine::kColumns - 1) / Machine::kColumns;
  }
  // Splits of tiles, a tile's one after the other; the last tiles, which with causality have the most keys, come first.
  static __host__ __device__ int64_t tiles(const AttentionArgs& args) {
    return RowTiling<Machine::kRows>(args.group(), args.window.queries).tiles * args.splits;
  }

  template <int>
  __device__ __forceinline__ auto stationary() const {
    return this->rows_of_heads(args_.query, args_.head_dim);
  }
  template <int>
  __device__ __forceinline__ auto streamed(int64_t key) const {
    return this->rows_of_keys(args_.key, args_.head_dim, key, 0);
  }
  __device__ __forceinline__ auto summed(int64_t key) const {
    return this->rows_of_keys(args_.value, args_.value_dim, key, column_);
  }

  __device__ __forceinline__ bool weigh(int64_t key, typename Machine::Scores& scores,
                                        typename Machine::Result& result) {
    const bool excluding = this->excludes(key);
    float corrections[Machine::kThreadRows];
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) {
      float largest = -INFINITY;
      if (excluding) this->complete(i, key, scores);
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j) largest = fmaxf(largest, scores.at(i, j));
      largest = warp_reduce<Machine::kRowLanes>(largest, [](float a, float b) { return fmaxf(a, b); });
      SoftmaxSum& softmax = softmax_[i];
      const float maximum = fmaxf(softmax.maximum, largest), base = softmax_base(maximum);
      corrections[i] = exponential(softmax.maximum - base);
      softmax = {maximum, softmax.sum * corrections[i]};
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j) {
        scores.at(i, j) = exponential(scores.at(i, j) - base);
        softmax.sum += scores.at(i, j);
      }
    }
    Machine::scale(result, [&](int i) { return corrections[i]; });
    return excluding;
  }

  __device__ __forceinline__ void finish(typename Machine::Result& result) {
#pragma unroll
    for (SoftmaxSum& softmax : softmax_)
      softmax.sum = warp_reduce<Machine::kRowLanes>(softmax.sum, [](float a, float b) { return a + b; });
    if (column_ == 0 && threadIdx.x % Machine::kRowLanes == 0) {
#pragma unroll
      for (int i = 0; i < Machine::kThreadRows; ++i) {
        if (!rows_[i].exists) continue;
        if (args_.splits == 1) {
          args_.lse[rows_[i].index] = lse_of(softmax_[i]);
        } else {
          args_.split_maximum[split_row(i)] = softmax_[i].maximum;
          args_.split_sum[split_row(i)] = softmax_[i].sum;
        }
      }
    }
    if (args_.splits == 1) Machine::scale(result, [&](int i) { return factor_of(softmax_[i]); });
    Machine::for_each_run(result, [&](int i, int column, const auto& run) {
      if (!rows_[i].exists) return;
      const int64_t width = args_.value_dim;
      if (args_.splits == 1)
        store_run(static_cast<T*>(args_.output) + rows_[i].index * width, column_ + column, width, run, args_.vectors);
      else
        store_run(args_.split_output + split_row(i) * width, column_ + column, width, run, args_.vectors);
    });
  }

 private:
  __device__ __forceinline__ Forward(const AttentionArgs& args, const BlockPlace& place)
      : Base(args, place, (tiles(args) - 1 - place.tile) / args.splits, split_of(args, place) * args.split_keys,
             (split_of(args, place) + 1) * args.split_keys),
        split_(split_of(args, place)) {
    // The sink is in the sum of one thread of a row; it is added when splits are, if there are several.
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) {
      softmax_[i] = {-INFINITY, 0.0f};
      if (args.splits == 1 && rows_[i].exists) softmax_[i] = sum_of_sink(args, rows_[i].head);
      if (threadIdx.x % Machine::kRowLanes != 0) softmax_[i].sum = 0.0f;
    }
  }
  static __device__ __forceinline__ int64_t split_of(const AttentionArgs& args, const BlockPlace& place) {
    return place.tile % args.splits;
  }
  __device__ __forceinline__ int64_t split_row(int i) const { return split_ * args_.rows() + rows_[i].index; }

  int64_t split_;
  SoftmaxSum softmax_[Machine::kThreadRows];
};

// A warp adds up the splits of a row in their order, but for those without keys.
template <class T>
__global__ void __launch_bounds__(kWarpSize) merge_splits(AttentionArgs args) {
  const int64_t row = blockIdx.x, rows = args.rows(), width = args.value_dim;
  const SoftmaxSum sink = sum_of_sink(args, row / args.window.queries % args.heads);
  float maximum = sink.maximum;
  for (int64_t split = 0; split < args.splits; ++split)
    maximum = fmaxf(maximum, args.split_maximum[split * rows + row]);
  const float base = softmax_base(maximum);
  SoftmaxSum softmax{maximum, sink.sum == 0.0f ? 0.0f : exponential(sink.maximum - base)};
  for (int64_t split = 0; split < args.splits; ++split) {
    const int64_t part = split * rows + row;
    const float weight = exponential(args.split_maximum[part] - base);
    if (args.split_sum[part] != 0.0f) softmax.sum += weight * args.split_sum[part];
  }
  if (warp_lane() == 0) args.lse[row] = lse_of(softmax);
  const float factor = factor_of(softmax);
  for (int64_t column = warp_lane(); column < width; column += kWarpSize) {
    float sum = 0.0f;
    for (int64_t split = 0; split < args.splits; ++split) {
      const int64_t part = split * rows + row;
      const float weight = exponential(args.split_maximum[part] - base);
      if (args.split_sum[part] != 0.0f) sum = fmaf(weight, args.split_output[part * width + column], sum);
    }
    static_cast<T*>(args.output)[row * width + column] = from_float<T>(sum * factor);
  }
}

}  // namespace rudnn
