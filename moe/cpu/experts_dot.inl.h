// The phases of the experts over dot products of rows.
#include "cpu/experts_units.inl.h"
#include "cpu/silu.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Elements of any float type, multiplied in float32.
template <class T>
struct WideProduct {
  using Element = T;
  static constexpr int kStep = 1;                               // elements of an operand, which is as large as a float
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);  // whether elements are operands as they lie in memory

  template <class Lanes>
  static Vec operands(const T* pointer, Lanes lanes) {
    return load(pointer, lanes);
  }
  static Vec add_product(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

// Operands of a panel of weights, which stays in the first cache.
inline constexpr int64_t kDotLength = 128;
// Of those, operands that are summed in a register before they are added to the total, so that the error stays small:
// fewer in generic code, whose products are rounded before they are added.
inline constexpr int64_t kSumTerms = kWidth == 4 ? 8 : kDotLength;
// Rows of a group that are worked on at a time, which share a reading of the weights: as many as the stack is for.
template <class Product>
inline constexpr int64_t kGroupRows = Product::kInPlace ? 192 : 96;
// Rows of activations so few that a panel of weights would take more time than it saves, and operands of each that are
// worked on at a time, which take a part of the second cache.
inline constexpr int kFewRows = kWidth == 16 ? 8 : 4;
inline constexpr int64_t kFewLength = 12 * kDotLength;
// Rows of weights of a panel, and rows of activations that are multiplied with it at a time: as many as there are
// registers for, and at the end of a group as few as keep the units of products busy.
inline constexpr int kPanelVectors = kWidth == 16 ? 4 : 2;
inline constexpr int kPanelRows = kPanelVectors * kWidth;
inline constexpr int kDotTileRows = kWidth == 4 ? 4 : 6;
inline constexpr int kDotLastRows = kWidth == 8 ? 3 : 2;
static_assert(kDotBlock % kPanelRows == 0);

// Calls body(element, lanes) over [0, elements), in vectors of operands. Lanes are of elements, as Product::operands
// takes them.
template <class Product, class Body>
[[gnu::always_inline]] inline void for_each_vector_of_operands(int64_t elements, Body&& body) {
  constexpr int64_t kElements = kWidth * Product::kStep;
  int64_t element = 0;
  for (; element + kElements <= elements; element += kElements) body(element, Full{});
  if (element < elements) body(element, Partial{static_cast<int>(elements - element)});
}

// Operands that hold so many elements.
template <class Product>
inline int64_t operand_count(int64_t elements) {
  return ceil_div(elements, Product::kStep);
}
template <class Product>
inline int64_t operand_count(Full) {
  return kWidth;
}
template <class Product>
inline int64_t operand_count(Partial lanes) {
  return operand_count<Product>(int64_t{lanes.count});
}

// Elements [begin, begin + elements) of rows of activations as operands, the last one filled up with 0.
template <class Product, int64_t kRows, int64_t kLength>
class ActivationRows {
 public:
  ActivationRows(const typename Product::Element* const* rows, int64_t row_count, int64_t begin, int64_t elements) {
    for (int64_t row = 0; row < row_count; ++row) {
      const auto* activations = rows[row] + begin;
      if constexpr (Product::kInPlace) {
        rows_[row] = activations;
      } else {
        for_each_vector_of_operands<Product>(elements, [&](int64_t element, auto lanes) __attribute__((always_inline)) {
          store(copies_[row] + element / Product::kStep, Product::operands(activations + element, lanes), Full{});
        });
        rows_[row] = copies_[row];
      }
    }
  }

  const float* row(int64_t row) const { return rows_[row]; }

 private:
  alignas(64) float copies_[Product::kInPlace ? 1 : kRows][Product::kInPlace ? 1 : kLength];
  const float* rows_[kRows];
};

// The operands that begin at an element of kWidth rows of weights: operands[i] is the i-th of each row. Fetches some
// more of the rows if asked to.
template <class Product, bool kFetches, class Lanes>
[[gnu::always_inline]] inline void load_operands(const typename Product::Element* const* weights, int64_t element,
                                                 Lanes lanes, Vec (&operands)[kWidth]) {
#pragma GCC unroll 16
  for (int row = 0; row < kWidth; ++row) {
    if constexpr (kFetches) __builtin_prefetch(reinterpret_cast<const char*>(weights[row] + element) + 192);
    Vec of_row = Product::operands(weights[row] + element, lanes);
    pin(of_row);
    operands[row] = of_row;
  }
  transpose(operands);
}

// Sums of a row for a block of features: of gate and of up, half of it each, or of down.
struct DotSums {
  alignas(64) float features[kDotBlock];
};

inline void add_sum(Vec sum, bool set, float* total) { store(total, set ? sum : load(total, Full{}) + sum, Full{}); }

// Adds the products of row_count rows of activations, at most kRows, and of kVectors vectors of rows of weights to the
// totals from `feature` on, or sets them.
template <class Product, int kRows, int kVectors>
inline void add_few(const typename Product::Element* const (&weights)[kVectors * kWidth], int64_t elements,
                    const float* const (&activations)[kRows], int64_t row_count, bool set, int feature,
                    DotSums* totals) {
  constexpr int64_t kElements = kSumTerms * Product::kStep;
  for (int64_t begin = 0; begin < elements; begin += kElements) {
    Vec sums[kRows][kVectors];
    for (auto& row : sums) {
      for (auto& sum : row) sum = broadcast(0.0f);
    }
    for_each_vector_of_operands<Product>(
        smaller(kElements, elements - begin), [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          const int64_t k = (begin + i) / Product::kStep;
#pragma GCC unroll 4
          for (int vector = 0; vector < kVectors; ++vector) {
            Vec operands[kWidth];
            load_operands<Product, true>(weights + vector * kWidth, begin + i, lanes, operands);
#pragma GCC unroll 16
            for (int j = 0; j < kWidth; ++j) {
              if (j >= operand_count<Product>(lanes)) break;
#pragma GCC unroll 8
              for (int row = 0; row < kRows; ++row) {
                sums[row][vector] =
                    Product::add_product(operands[j], broadcast(activations[row][k + j]), sums[row][vector]);
              }
            }
          }
        });
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      if (row >= row_count) break;
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) {
        add_sum(sums[row][vector], set && begin == 0, totals[row].features + feature + vector * kWidth);
      }
    }
  }
}

// Sets the totals of row_count rows of activations, at most kFewRows; kRows becomes row_count rounded up to a power
// of 2.
template <class Product, int kRows = 1>
[[gnu::noinline]] void multiply_few(const typename Product::Element* const (&weights)[kDotBlock],
                                    const typename Product::Element* const* rows, int64_t row_count, int64_t length,
                                    DotSums* totals) {
  if constexpr (kRows < kFewRows) {
    if (row_count > kRows) return multiply_few<Product, 2 * kRows>(weights, rows, row_count, length, totals);
  }
  // As many sums as the latency of an addition needs.
  constexpr int kVectors = kWidth == 16 || kRows >= 4 ? 1 : kWidth == 8 || kRows == 2 ? 2 : 4;
  constexpr int64_t kElements = kDotLength * Product::kStep;
  constexpr int64_t kPart = kFewLength * Product::kStep;
  for (int64_t part = 0; part < length; part += kPart) {
    const int64_t part_end = smaller(part + kPart, length);
    const ActivationRows<Product, kFewRows, kFewLength> part_rows(rows, row_count, part, part_end - part);
    for (int feature = 0; feature < kDotBlock; feature += kVectors * kWidth) {
      for (int64_t begin = part; begin < part_end; begin += kElements) {
        const typename Product::Element* some_weights[kVectors * kWidth];
        for (int row = 0; row < kVectors * kWidth; ++row) some_weights[row] = weights[feature + row] + begin;
        const float* activations[kRows];
        for (int row = 0; row < kRows; ++row) {
          activations[row] = part_rows.row(smaller(row, row_count - 1)) + (begin - part) / Product::kStep;
        }
        add_few<Product, kRows, kVectors>(some_weights, smaller(kElements, part_end - begin), activations, row_count,
                                          begin == 0, feature, totals);
      }
    }
  }
}

// kPanelRows rows of weights in the order in which they are used.
struct WeightPanel {
  alignas(64) Vec operands[kDotLength][kPanelVectors];
};

template <class Product>
inline void fill_panel(const typename Product::Element* const (&weights)[kPanelRows], int64_t elements,
                       WeightPanel& panel) {
  for (int vector = 0; vector < kPanelVectors; ++vector) {
    for_each_vector_of_operands<Product>(elements, [&](int64_t element, auto lanes) __attribute__((always_inline)) {
      Vec operands[kWidth];
      load_operands<Product, false>(weights + vector * kWidth, element, lanes, operands);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) panel.operands[element / Product::kStep + i][vector] = operands[i];
    });
  }
}

// Weights of a later panel, `distance` elements from those of this one, fetched while this one is multiplied.
template <class Product>
class ComingPanel {
 public:
  using T = typename Product::Element;

  // step() will be called `steps` times, and fetches at most a line: with fewer steps than lines some are left out.
  ComingPanel(const T* const (&weights)[kPanelRows], int64_t distance, int64_t steps)
      : weights_(weights), distance_(distance), interval_(larger(steps / kLines, 1)) {}

  [[gnu::always_inline]] void step() {
    if (--wait_ > 0 || line_ == kLines) return;
    wait_ = interval_;
    __builtin_prefetch(weights_[line_ % kPanelRows] + distance_ + line_ / kPanelRows * kLineElements, 0, 2);
    ++line_;
  }

 private:
  static constexpr int64_t kLineElements = 64 / sizeof(T);
  static constexpr int64_t kLines = ceil_div(kDotLength * Product::kStep, kLineElements) * kPanelRows;

  const T* const (&weights_)[kPanelRows];
  int64_t distance_;
  int64_t interval_;
  int64_t wait_ = 0;
  int64_t line_ = 0;
};

// Adds the products of `length` operands of row_count rows of activations from `first` on, at most kRows, and of a
// panel to the totals from `feature` on, or sets them. The sums are those of add_few.
template <class Product, int kRows, class Activations>
inline void add_tile(const WeightPanel& panel, int64_t length, const Activations& rows, int64_t first,
                     int64_t row_count, bool set, int feature, ComingPanel<Product>& coming, DotSums* totals) {
  const float* activations[kRows];
  for (int row = 0; row < kRows; ++row) activations[row] = rows.row(first + smaller(row, row_count - 1));
  for (int64_t begin = 0; begin < length; begin += kSumTerms) {
    const int64_t end = smaller(begin + kSumTerms, length);
    Vec sums[kRows][kPanelVectors];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int vector = 0; vector < kPanelVectors; ++vector) sums[row][vector] = broadcast(0.0f);
    }
    for (int64_t k = begin; k < end; ++k) {
      coming.step();
      Vec weights[kPanelVectors];
#pragma GCC unroll 4
      for (int vector = 0; vector < kPanelVectors; ++vector) weights[vector] = panel.operands[k][vector];
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const Vec activation = broadcast(activations[row][k]);
#pragma GCC unroll 4
        for (int vector = 0; vector < kPanelVectors; ++vector) {
          sums[row][vector] = Product::add_product(weights[vector], activation, sums[row][vector]);
        }
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      if (row >= row_count) break;
#pragma GCC unroll 4
      for (int vector = 0; vector < kPanelVectors; ++vector) {
        add_sum(sums[row][vector], set && begin == 0, totals[first + row].features + feature + vector * kWidth);
      }
    }
  }
}

// The same as multiply_few for at most kGroupRows rows. The weights that come next lie `distance` elements from these.
template <class Product>
[[gnu::noinline]] void multiply_many(const typename Product::Element* const (&weights)[kDotBlock], int64_t distance,
                                     const typename Product::Element* const* rows, int64_t row_count, int64_t length,
                                     DotSums* totals) {
  constexpr int64_t kElements = kDotLength * Product::kStep;
  for (int64_t begin = 0; begin < length; begin += kElements) {
    const int64_t elements = smaller(kElements, length - begin);
    const int64_t steps = operand_count<Product>(elements);
    const ActivationRows<Product, kGroupRows<Product>, kDotLength> activations(rows, row_count, begin, elements);
    for (int feature = 0; feature < kDotBlock; feature += kPanelRows) {
      const typename Product::Element* some_weights[kPanelRows];
      for (int row = 0; row < kPanelRows; ++row) some_weights[row] = weights[feature + row] + begin;
      WeightPanel panel;
      fill_panel<Product>(some_weights, elements, panel);
      ComingPanel<Product> coming(some_weights, begin + kElements < length ? kElements : distance - begin,
                                  ceil_div(row_count, kDotTileRows) * steps);
      int64_t first = 0;
      for (; row_count - first > kDotLastRows; first += kDotTileRows) {
        add_tile<Product, kDotTileRows>(panel, steps, activations, first, smaller(kDotTileRows, row_count - first),
                                        begin == 0, feature, coming, totals);
      }
      if (first < row_count) {
        add_tile<Product, kDotLastRows>(panel, steps, activations, first, row_count - first, begin == 0, feature,
                                        coming, totals);
      }
    }
  }
}

// Calls use(row, sums) for rows [begin, end) of a group, given by activation_row(row), with their sums for kDotBlock
// rows of weights. The rows of the group's next block lie `distance` elements from these.
template <class Product, class ActivationRow, class Use>
inline void multiply_rows(int64_t begin, int64_t end, int64_t length,
                          const typename Product::Element* const (&weights)[kDotBlock], int64_t distance,
                          const ActivationRow& activation_row, Use&& use) {
  constexpr int64_t kRows = kGroupRows<Product>;
  DotSums totals[kRows];
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t count = smaller(kRows, end - first);
    const typename Product::Element* rows[kRows];
    for (int64_t row = 0; row < count; ++row) rows[row] = activation_row(first + row);
    if (count <= kFewRows) {
      multiply_few<Product>(weights, rows, count, length, totals);
    } else {
      multiply_many<Product>(weights, first + count < end ? 0 : distance, rows, count, length, totals);
    }
    for (int64_t row = 0; row < count; ++row) use(first + row, totals[row].features);
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
  constexpr int kHalf = kDotBlock / 2;
  const int64_t hidden = args.hidden;
  const T* gate = static_cast<const T*>(args.gate.data) + group.expert * args.gate.stride + feature * hidden;
  const T* up = static_cast<const T*>(args.up.data) + group.expert * args.up.stride + feature * hidden;
  const T* weights[kDotBlock];
  for (int row = 0; row < kDotBlock; ++row) {
    weights[row] = (row < kHalf ? gate : up) + smaller(row % kHalf, count - 1) * hidden;
  }
  multiply_rows<Product>(
      group.begin, group.end, hidden, weights, kHalf * hidden, [&](int64_t row) { return input_row<T>(args, row); },
      [&](int64_t row, const float* sums) { store_activated<T>(args, row, feature, count, sums, sums + kHalf); });
}

template <class Product>
void activated_units(const ExpertsArgs& args, int64_t begin, int64_t end) {
  for_each_unit(args.group_count, begin, end, [&](int64_t group, int64_t block) {
    const int64_t feature = block * (kDotBlock / 2);
    activate_group<Product>(args, args.groups[group], feature, smaller(kDotBlock / 2, args.intermediate - feature));
  });
}

// Rounds features [feature, feature + count) of a row, or adds them to its token.
template <class T>
inline void store_output(const ExpertsArgs& args, int64_t row, int64_t feature, int64_t count, const float* values) {
  if (args.sums == nullptr) {
    T* output = static_cast<T*>(args.output) + row * args.hidden + feature;
    for_each_vector(count, [&](int64_t i, auto lanes) { store(output + i, load(values + i, lanes), lanes); });
  } else {
    float* sum = args.sums + args.row_tokens[row] * args.sum_stride + feature;
    const Vec weight = broadcast(args.row_weights[row]);
    for_each_vector(count, [&](int64_t i, auto lanes) {
      store(sum + i, fma(load(values + i, lanes), weight, load(sum + i, lanes)), lanes);
    });
  }
}

template <class Product>
void project_group(const ExpertsArgs& args, const ExpertGroup& group, int64_t feature, int64_t count) {
  using T = typename Product::Element;
  const int64_t length = args.intermediate;
  const T* down = static_cast<const T*>(args.down.data) + group.expert * args.down.stride + feature * length;
  const T* weights[kDotBlock];
  for (int row = 0; row < kDotBlock; ++row) weights[row] = down + smaller(row, count - 1) * length;
  multiply_rows<Product>(
      group.begin, group.end, length, weights, kDotBlock * length,
      [&](int64_t row) { return static_cast<const T*>(args.activated) + row * length; },
      [&](int64_t row, const float* sums) { store_output<T>(args, row, feature, count, sums); });
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
  const int64_t first = begin * kDotBlock;
  const int64_t last = smaller(end * kDotBlock, args.hidden);
  const bool fused = args.sums != nullptr;
  if (fused) clear_sums(args, first, last - first);
  for (int64_t group = 0; group < args.group_count; ++group) {
    for (int64_t feature = first; feature < last; feature += kDotBlock) {
      project_group<Product>(args, args.groups[group], feature, smaller(kDotBlock, last - feature));
    }
  }
  if (fused) round_sums<typename Product::Element>(args, first, last - first);
}

}  // namespace
}  // namespace rudnn::RUDNN_ISA
