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
  static void pin_operand(Operand& operand) { pin(operand); }
  static Vec add_product(Operand a, Operand b, Vec sum) { return fma(a, b, sum); }
};

// Rows of weights by rows of activations that are multiplied at a time, as many as there are registers for.
inline constexpr int kDotRows = kWidth == 16 ? 8 : 4;
inline constexpr int kDotColumns = kWidth == 4 ? 2 : 3;
// Operands that are summed in a register, before they are added to the total: with these, the weights of a block take
// a third of the first cache.
inline constexpr int64_t kDotSteps = kWidth == 16 ? 32 : 64;
// Rows of a group that are worked on at a time.
inline constexpr int64_t kDotGroup = 96;

// kDotRows rows of weights as they lie in memory.
template <class Product>
struct WeightRows {
  const typename Product::Element* rows[kDotRows];
  int64_t prefetch_distance;  // to what will be needed soon, in elements

  template <class Lanes>
  typename Product::Operand operand(int64_t k, int row, Lanes lanes) const {
    __builtin_prefetch(rows[row] + k + prefetch_distance, 0, 2);
    return Product::operand(rows[row] + k, lanes);
  }
};

// The same in the order in which they are used, so that they stay in the first cache.
template <class Product>
struct WeightPanel {
  alignas(64) typename Product::Operand operands[kDotSteps][kDotRows];

  template <class Lanes>
  typename Product::Operand operand(int64_t k, int row, Lanes) const {
    return operands[k / Product::kStep][row];
  }
};

// Calls step(k, lanes) over [0, length), in steps of an operand.
template <class Product, class Step>
[[gnu::always_inline]] inline void for_each_step(int64_t length, Step&& step) {
  int64_t k = 0;
  for (; k + Product::kStep <= length; k += Product::kStep) step(k, Full{});
  if (k < length) step(k, static_cast<int>(length - k));
}

template <class Product>
inline void fill_panel(const WeightRows<Product>& weights, int64_t length, WeightPanel<Product>& panel) {
  for_each_step<Product>(length, [&](int64_t k, auto lanes) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int row = 0; row < kDotRows; ++row) {
      panel.operands[k / Product::kStep][row] = weights.operand(k, row, lanes);
    }
  });
}

// sums[c][r] is the dot product of `length` elements of row r of the weights and of activations[c].
template <class Product, class Weights>
[[gnu::always_inline]] inline void dot_products(const Weights& weights,
                                                const typename Product::Element* const (&activations)[kDotColumns],
                                                int64_t length, float (&sums)[kDotColumns][kDotRows]) {
  Vec accumulators[kDotColumns][kDotRows];
  for (auto& column : accumulators) {
    for (auto& accumulator : column) accumulator = broadcast(0.0f);
  }
  for_each_step<Product>(length, [&](int64_t k, auto lanes) __attribute__((always_inline)) {
    typename Product::Operand b[kDotColumns];
#pragma GCC unroll 3
    for (int column = 0; column < kDotColumns; ++column) b[column] = Product::operand(activations[column] + k, lanes);
#pragma GCC unroll 8
    for (int row = 0; row < kDotRows; ++row) {
      auto a = weights.operand(k, row, lanes);
      Product::pin_operand(a);
#pragma GCC unroll 3
      for (int column = 0; column < kDotColumns; ++column) {
        accumulators[column][row] = Product::add_product(a, b[column], accumulators[column][row]);
      }
    }
  });
#pragma GCC unroll 3
  for (int column = 0; column < kDotColumns; ++column) reduce_add_each(accumulators[column], sums[column]);
}

// totals[a][w] is the dot product of row a of the activations and row w of the weights.
template <int kFeatures>
using DotTotals = float[kDotGroup][kFeatures];

// Sets the totals for row_count rows of activations. activation_row(a) and weight_row(w) give the rows.
template <class Product, int kFeatures, class WeightRow, class ActivationRow>
inline void set_dot_products(int64_t row_count, int64_t length, const WeightRow& weight_row,
                             const ActivationRow& activation_row, int64_t prefetch_distance,
                             DotTotals<kFeatures>& totals) {
  constexpr int64_t kLength = kDotSteps * Product::kStep;
  const auto use_weights = [&](const auto& weights, int64_t begin, int position) {
    for (int64_t first = 0; first < row_count; first += kDotColumns) {
      const typename Product::Element* activations[kDotColumns];
      for (int column = 0; column < kDotColumns; ++column) {
        activations[column] = activation_row(smaller(first + column, row_count - 1)) + begin;
      }
      float sums[kDotColumns][kDotRows];
      dot_products<Product>(weights, activations, smaller(kLength, length - begin), sums);
      for (int64_t column = 0; column < smaller(kDotColumns, row_count - first); ++column) {
        float* total = totals[first + column] + position;
        if (begin == 0) {
          for (int row = 0; row < kDotRows; ++row) total[row] = sums[column][row];
        } else {
          for (int row = 0; row < kDotRows; ++row) total[row] += sums[column][row];
        }
      }
    }
  };
  for (int64_t begin = 0; begin < length; begin += kLength) {
    for (int position = 0; position < kFeatures; position += kDotRows) {
      WeightRows<Product> weights;
      weights.prefetch_distance = prefetch_distance;
      for (int row = 0; row < kDotRows; ++row) weights.rows[row] = weight_row(position + row) + begin;
      if (row_count <= 2 * kDotColumns) {
        use_weights(weights, begin, position);
      } else {
        WeightPanel<Product> panel;
        fill_panel(weights, smaller(kLength, length - begin), panel);
        use_weights(panel, begin, position);
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
  // kHalf rows of gate and of up by turns.
  const auto weight_row = [&](int row) {
    const int64_t chosen = smaller(row / kDotRows * kHalf + row % kHalf, count - 1);
    return (row % kDotRows < kHalf ? gate : up) + chosen * hidden;
  };
  for (int64_t first = group.begin; first < group.end; first += kDotGroup) {
    const int64_t rows = smaller(kDotGroup, group.end - first);
    DotTotals<2 * kActivatedBlock> totals;
    set_dot_products<Product, 2 * kActivatedBlock>(
        rows, hidden, weight_row, [&](int64_t row) { return input_row<T>(args, first + row); }, kHalf * hidden, totals);
    for (int64_t row = 0; row < rows; ++row) {
      float gates[kActivatedBlock], ups[kActivatedBlock];
      for (int i = 0; i < kActivatedBlock; ++i) {
        gates[i] = totals[row][i / kHalf * kDotRows + i % kHalf];
        ups[i] = totals[row][i / kHalf * kDotRows + kHalf + i % kHalf];
      }
      store_activated<T>(args, first + row, feature, count, gates, ups);
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
        rows, length, weight_row,
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
