// The phases of the experts over dot products of rows.
#include "cpu/experts_units.inl.h"
#include "cpu/silu.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Elements of any float type, multiplied in float32.
template <class T>
struct WideProduct {
  using Element = T;
  using Operand = Vec;
  static constexpr int kStep = kWidth;  // elements of an operand

  static Operand operand(const T* pointer, Full lanes) { return load(pointer, lanes); }
  static Operand operand(const T* pointer, int count) { return load(pointer, Partial{count}); }
  static Vec add_product(Operand a, Operand b, Vec sum) { return fma(a, b, sum); }
};

// Rows of weights by rows of activations that are multiplied at a time, as many as there are registers for.
inline constexpr int kDotRows = kWidth == 16 ? 8 : 4;
inline constexpr int kDotColumns = kWidth == 4 ? 2 : 3;
// Elements that are summed in a register, before they are added to the total.
inline constexpr int64_t kDotLength = 1024;
// Rows of a group that are worked on at a time.
inline constexpr int64_t kDotGroup = 96;

// sums[c][r] is the dot product of length elements of weights[r] and activations[c].
template <class Product, bool kPrefetch>
[[gnu::always_inline]] inline void dot_products(const typename Product::Element* const (&weights)[kDotRows],
                                                const typename Product::Element* const (&activations)[kDotColumns],
                                                int64_t length, int64_t prefetch_distance,
                                                float (&sums)[kDotColumns][kDotRows]) {
  Vec accumulators[kDotColumns][kDotRows];
  for (auto& column : accumulators) {
    for (auto& accumulator : column) accumulator = broadcast(0.0f);
  }
  const auto step = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
    typename Product::Operand b[kDotColumns];
#pragma GCC unroll 3
    for (int column = 0; column < kDotColumns; ++column) b[column] = Product::operand(activations[column] + k, lanes);
#pragma GCC unroll 8
    for (int row = 0; row < kDotRows; ++row) {
      const auto a = Product::operand(weights[row] + k, lanes);
      if constexpr (kPrefetch) __builtin_prefetch(weights[row] + k + prefetch_distance, 0, 2);
#pragma GCC unroll 3
      for (int column = 0; column < kDotColumns; ++column) {
        accumulators[column][row] = Product::add_product(a, b[column], accumulators[column][row]);
      }
    }
  };
  int64_t k = 0;
  for (; k + Product::kStep <= length; k += Product::kStep) step(k, Full{});
  if (k < length) step(k, static_cast<int>(length - k));
#pragma GCC unroll 3
  for (int column = 0; column < kDotColumns; ++column) reduce_add_each(accumulators[column], sums[column]);
}

// Where the sums of a block of features go: totals[row][feature] of the rows of a group.
template <int kFeatures>
using DotTotals = float[kDotGroup][kFeatures];

// Sets the totals to the dot products of rows of weights, which weight_row(feature) gives, and of row_count rows of
// activations, which activation_row(row) gives. Features are worked on in the order of feature_at(0), feature_at(1),
// ...
template <class Product, int kFeatures, class FeatureAt, class WeightRow, class ActivationRow>
inline void set_dot_products(int64_t row_count, int64_t length, const FeatureAt& feature_at,
                             const WeightRow& weight_row, const ActivationRow& activation_row,
                             int64_t prefetch_distance, DotTotals<kFeatures>& totals) {
  using T = typename Product::Element;
  for (int64_t begin = 0; begin < length; begin += kDotLength) {
    const int64_t count = smaller(kDotLength, length - begin);
    for (int position = 0; position < kFeatures; position += kDotRows) {
      const T* weights[kDotRows];
      for (int row = 0; row < kDotRows; ++row) weights[row] = weight_row(feature_at(position + row)) + begin;
      for (int64_t first = 0; first < row_count; first += kDotColumns) {
        const T* activations[kDotColumns];
        for (int column = 0; column < kDotColumns; ++column) {
          activations[column] = activation_row(smaller(first + column, row_count - 1)) + begin;
        }
        float sums[kDotColumns][kDotRows];
        if (first == 0) {
          dot_products<Product, true>(weights, activations, count, prefetch_distance, sums);
        } else {
          dot_products<Product, false>(weights, activations, count, 0, sums);
        }
        for (int64_t column = 0; column < smaller(kDotColumns, row_count - first); ++column) {
          for (int row = 0; row < kDotRows; ++row) {
            float& total = totals[first + column][feature_at(position + row)];
            total = begin == 0 ? sums[column][row] : total + sums[column][row];
          }
        }
      }
    }
  }
}

template <class T>
inline const T* input_row(const ExpertsArgs& args, int64_t row) {
  return static_cast<const T*>(args.input) + (args.sums != nullptr ? args.row_tokens[row] : row) * args.hidden;
}

template <class T>
inline void store_activated(const ExpertsArgs& args, int64_t row, int64_t feature, int64_t count, const float* gate,
                            const float* up) {
  const int64_t offset = row * args.intermediate + feature;
  for_each_vector(count, [&](int64_t i, auto lanes) {
    const Vec g = load(gate + i, lanes);
    const Vec u = load(up + i, lanes);
    store(static_cast<T*>(args.activated) + offset + i, Silu::value(g) * u, lanes);
    if (args.gate_projection != nullptr) {
      store(static_cast<T*>(args.gate_projection) + offset + i, g, lanes);
      store(static_cast<T*>(args.up_projection) + offset + i, u, lanes);
    }
  });
}

// Features [feature, feature + count) of the rows of one group.
template <class Product>
void activate_group(const ExpertsArgs& args, const ExpertGroup& group, int64_t feature, int64_t count) {
  using T = typename Product::Element;
  constexpr int kHalf = kDotRows / 2;
  const int64_t hidden = args.hidden;
  const T* gate = static_cast<const T*>(args.gate.data) + group.expert * args.gate.stride + feature * hidden;
  const T* up = static_cast<const T*>(args.up.data) + group.expert * args.up.stride + feature * hidden;
  // The features of gate are followed by those of up; kHalf of each are multiplied at a time.
  const auto feature_at = [](int position) {
    return position / kDotRows * kHalf + position % kHalf + (position % kDotRows < kHalf ? 0 : kActivatedBlock);
  };
  const auto weight_row = [&](int row) {
    return row < kActivatedBlock ? gate + smaller(row, count - 1) * hidden
                                 : up + smaller(row - kActivatedBlock, count - 1) * hidden;
  };
  for (int64_t first = group.begin; first < group.end; first += kDotGroup) {
    const int64_t rows = smaller(kDotGroup, group.end - first);
    DotTotals<2 * kActivatedBlock> totals;
    set_dot_products<Product, 2 * kActivatedBlock>(
        rows, hidden, feature_at, weight_row, [&](int64_t row) { return input_row<T>(args, first + row); },
        kHalf * hidden, totals);
    for (int64_t row = 0; row < rows; ++row) {
      store_activated<T>(args, first + row, feature, count, totals[row], totals[row] + kActivatedBlock);
    }
  }
}

template <class Product>
void activated_units(const ExpertsArgs& args, int64_t begin, int64_t end) {
  for_each_unit(args.group_count, begin, end, [&](int64_t group, int64_t block) {
    const int64_t feature = block * kActivatedBlock;
    activate_group<Product>(args, args.groups[group], feature, smaller(kActivatedBlock, args.intermediate - feature));
  });
}

// Rounds features [feature, feature + count) of the rows of one group, or adds them to their tokens.
template <class Product>
void project_group(const ExpertsArgs& args, const ExpertGroup& group, int64_t feature, int64_t count) {
  using T = typename Product::Element;
  const int64_t length = args.intermediate;
  const T* down = static_cast<const T*>(args.down.data) + group.expert * args.down.stride + feature * length;
  const auto weight_row = [&](int row) { return down + smaller(row, count - 1) * length; };
  for (int64_t first = group.begin; first < group.end; first += kDotGroup) {
    const int64_t rows = smaller(kDotGroup, group.end - first);
    DotTotals<kOutputBlock> totals;
    set_dot_products<Product, kOutputBlock>(
        rows, length, [](int position) { return position; }, weight_row,
        [&](int64_t row) { return static_cast<const T*>(args.activated) + (first + row) * length; }, kDotRows * length,
        totals);
    for (int64_t row = 0; row < rows; ++row) {
      if (args.sums == nullptr) {
        T* output = static_cast<T*>(args.output) + (first + row) * args.hidden + feature;
        for_each_vector(count, [&](int64_t i, auto lanes) { store(output + i, load(totals[row] + i, lanes), lanes); });
      } else {
        float* sum = args.sums + args.row_tokens[first + row] * args.sum_stride + feature;
        const Vec weight = broadcast(args.row_weights[first + row]);
        for_each_vector(count, [&](int64_t i, auto lanes) {
          store(sum + i, fma(load(totals[row] + i, lanes), weight, load(sum + i, lanes)), lanes);
        });
      }
    }
  }
}

inline void clear_sums(const ExpertsArgs& args, int64_t feature, int64_t count) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    float* sum = args.sums + token * args.sum_stride + feature;
    for_each_vector(count, [&](int64_t i, auto lanes) { store(sum + i, broadcast(0.0f), lanes); });
  }
}

template <class T>
inline void round_sums(const ExpertsArgs& args, int64_t feature, int64_t count) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    const float* sum = args.sums + token * args.sum_stride + feature;
    T* output = static_cast<T*>(args.output) + token * args.hidden + feature;
    for_each_vector(count, [&](int64_t i, auto lanes) { store(output + i, load(sum + i, lanes), lanes); });
  }
}

template <class Product>
void output_blocks(const ExpertsArgs& args, int64_t begin, int64_t end) {
  const int64_t first = begin * kOutputBlock;
  const int64_t last = smaller(end * kOutputBlock, args.hidden);
  const bool fused = args.sums != nullptr;
  if (fused) clear_sums(args, first, last - first);
  for (int64_t group = 0; group < args.group_count; ++group) {
    for (int64_t feature = first; feature < last; feature += kOutputBlock) {
      project_group<Product>(args, args.groups[group], feature, smaller(kOutputBlock, last - feature));
    }
  }
  if (fused) round_sums<typename Product::Element>(args, first, last - first);
}

}  // namespace
}  // namespace rudnn::RUDNN_ISA
