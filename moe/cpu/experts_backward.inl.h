// Gradients of the experts in float32, for any vector width: sums of float32 factors times rows of the other operand. A
// sum's order depends on its length alone, whatever is computed beside it.
#include "cpu/experts.h"
#include "cpu/experts_units.inl.h"
#include "cpu/silu.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Rows by vectors of columns that are summed at a time, as many as there are registers for.
inline constexpr int kOuterRows = kWidth == 4 ? 4 : 6;
inline constexpr int kOuterVectors = kWidth == 16 ? 4 : 2;
// Terms that are summed in a register, before they are added to the total: few, so that the error stays small.
inline constexpr int64_t kOuterLength = 32;
inline constexpr int64_t kPanelLength = 4 * kOuterLength;
// Rows of a tile, a multiple of kOuterRows.
inline constexpr int64_t kTileRows = 96;

struct Tile {
  alignas(64) float rows[kTileRows][kGradientBlock];
};

// The rows of the other operand, in float32; columns that it does not have are 0.
struct Panel {
  alignas(64) float rows[kPanelLength][kGradientBlock];
};

// Element (row, k) of the left operand lies at data[row * row_stride + k * k_stride].
struct Factors {
  const float* data;
  int64_t row_stride;
  int64_t k_stride;
};

template <class T>
inline void fill_panel(const T* rows, int64_t stride, int64_t count, int64_t columns, Panel& panel) {
  for (int64_t k = 0; k < count; ++k) {
    for_each_vector(
        columns, [&](int64_t i, auto lanes) { store(panel.rows[k] + i, load(rows + k * stride + i, lanes), Full{}); });
    for (int64_t i = (columns + kWidth - 1) / kWidth * kWidth; i < kGradientBlock; i += kWidth) {
      store(panel.rows[k] + i, broadcast(0.0f), Full{});
    }
  }
}

// Adds `length` terms to columns [column, column + kOuterVectors * kWidth) of kOuterRows rows of a tile, or sets them.
inline void add_terms(const float* const (&factors)[kOuterRows], int64_t k_stride, const float (*panel)[kGradientBlock],
                      int64_t length, int64_t column, bool set, float* const (&totals)[kOuterRows]) {
  Vec sums[kOuterRows][kOuterVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = broadcast(0.0f);
  }
  for (int64_t k = 0; k < length; ++k) {
    Vec columns[kOuterVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kOuterVectors; ++v) columns[v] = load(panel[k] + column + v * kWidth, Full{});
#pragma GCC unroll 6
    for (int row = 0; row < kOuterRows; ++row) {
      const Vec factor = broadcast(factors[row][k * k_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kOuterVectors; ++v) sums[row][v] = fma(factor, columns[v], sums[row][v]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kOuterRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kOuterVectors; ++v) {
      float* total = totals[row] + column + v * kWidth;
      store(total, set ? sums[row][v] : load(total, Full{}) + sums[row][v], Full{});
    }
  }
}

template <class T>
inline void prefetch_row(const T* row, int64_t columns) {
  const auto* bytes = reinterpret_cast<const char*>(row);
  for (int64_t offset = 0; offset < columns * static_cast<int64_t>(sizeof(T)); offset += 64) {
    __builtin_prefetch(bytes + offset, 0, 2);
  }
}

// Rows that will be needed soon, fetched a few at a time while others are multiplied.
template <class T>
class ComingRows {
 public:
  ComingRows(const T* rows, int64_t stride, int64_t count, int64_t columns, int64_t steps)
      : rows_(rows), stride_(stride), count_(count), columns_(columns), share_((count + steps - 1) / steps) {}

  void fetch_some() {
    for (int64_t i = 0; i < share_ && next_ < count_; ++i, ++next_) {
      prefetch_row(rows_ + next_ * stride_, columns_);
    }
  }

 private:
  const T* rows_;
  int64_t stride_;
  int64_t count_;
  int64_t columns_;
  int64_t share_;
  int64_t next_ = 0;
};

// Adds the product of row_count rows of factors and `columns` columns of `length` rows of b to a tile, or sets it.
template <class T>
inline void add_product(const Factors& a, int64_t row_count, const T* b, int64_t b_stride, int64_t columns,
                        int64_t length, bool set, Tile& tile) {
  Panel panel;
  for (int64_t begin = 0; begin < length; begin += kPanelLength) {
    const int64_t end = smaller(begin + kPanelLength, length);
    fill_panel(b + begin * b_stride, b_stride, end - begin, columns, panel);
    const int64_t coming = smaller(end + kPanelLength, length);
    ComingRows<T> next_panel(b + end * b_stride, b_stride, coming - end, columns,
                             (row_count + kOuterRows - 1) / kOuterRows);
    for (int64_t first = 0; first < row_count; first += kOuterRows) {
      float* totals[kOuterRows];
      for (int row = 0; row < kOuterRows; ++row) totals[row] = tile.rows[first + row];
      next_panel.fetch_some();
      for (int64_t k = begin; k < end; k += kOuterLength) {
        const float* factors[kOuterRows];
        for (int row = 0; row < kOuterRows; ++row) {
          factors[row] = a.data + smaller(first + row, row_count - 1) * a.row_stride + k * a.k_stride;
        }
        for (int64_t column = 0; column < columns; column += kOuterVectors * kWidth) {
          add_terms(factors, a.k_stride, panel.rows + (k - begin), smaller(kOuterLength, end - k), column,
                    set && k == 0, totals);
        }
      }
    }
  }
}

// Calls body(first, count) over [begin, end) in tiles of rows.
template <class Body>
inline void for_each_tile(int64_t begin, int64_t end, Body&& body) {
  for (int64_t first = begin; first < end; first += kTileRows) body(first, smaller(kTileRows, end - first));
}

template <class T>
inline void store_tile(const Tile& tile, int64_t row_count, int64_t columns, T* output, int64_t stride) {
  for (int64_t row = 0; row < row_count; ++row) {
    for_each_vector(columns, [&](int64_t i, auto lanes) {
      store(output + row * stride + i, load(tile.rows[row] + i, lanes), lanes);
    });
  }
}

template <class T>
inline const T* matrix_of(const ExpertMatrices<const void>& matrices, const ExpertGroup& group) {
  return static_cast<const T*>(matrices.data) + group.expert * matrices.stride;
}

// From the gradient of silu(gate) * up for a row to those of the projections gate and up, with the product itself.
template <class T>
inline void differentiate_row(const ExpertsBackwardArgs& args, int64_t row, int64_t column, int64_t columns,
                              const float* grad) {
  const int64_t offset = row * args.intermediate + column;
  for_each_vector(columns, [&](int64_t i, auto lanes) {
    const Vec gate = load(static_cast<const T*>(args.gate_projection) + offset + i, lanes);
    const Vec up = load(static_cast<const T*>(args.up_projection) + offset + i, lanes);
    const Vec upstream = load(grad + i, lanes);
    const Vec silu = Silu::value(gate);
    store(args.activated + offset + i, silu * up, lanes);
    store(args.grad_gate_projection + offset + i, upstream * up * Silu::slope(gate), lanes);
    store(args.grad_up_projection + offset + i, upstream * silu, lanes);
  });
}

template <class T>
void differentiate_group(const ExpertsBackwardArgs& args, const ExpertGroup& group, int64_t column, int64_t columns) {
  const T* down = matrix_of<T>(args.down, group) + column;
  for_each_tile(group.begin, group.end, [&](int64_t first, int64_t count) {
    Tile tile;
    const Factors grad = {args.wide_grad + first * args.hidden, args.hidden, 1};
    add_product(grad, count, down, args.intermediate, columns, args.hidden, true, tile);
    for (int64_t row = 0; row < count; ++row) differentiate_row<T>(args, first + row, column, columns, tile.rows[row]);
  });
}

template <class T>
void project_group_back(const ExpertsBackwardArgs& args, const ExpertGroup& group, int64_t column, int64_t columns) {
  const T* gate = matrix_of<T>(args.gate, group) + column;
  const T* up = matrix_of<T>(args.up, group) + column;
  const int64_t length = args.intermediate;
  for_each_tile(group.begin, group.end, [&](int64_t first, int64_t count) {
    Tile tile;
    const Factors grad_gate = {args.grad_gate_projection + first * length, length, 1};
    const Factors grad_up = {args.grad_up_projection + first * length, length, 1};
    add_product(grad_gate, count, gate, args.hidden, columns, length, true, tile);
    add_product(grad_up, count, up, args.hidden, columns, length, false, tile);
    store_tile(tile, count, columns, static_cast<T*>(args.grad_input) + first * args.hidden + column, args.hidden);
  });
}

// Rows of a group's factors for a tile of weight rows, one after the other: as they lie they would share a few sets of
// the cache.
struct FactorRows {
  alignas(64) float rows[kPanelLength][kTileRows];
};

inline void fill_factors(const float* data, int64_t stride, int64_t count, int64_t columns, FactorRows& factors) {
  for (int64_t k = 0; k < count; ++k) {
    for_each_vector(
        columns, [&](int64_t i, auto lanes) { store(factors.rows[k] + i, load(data + k * stride + i, lanes), lanes); });
  }
}

// The gradient of a weight of a group: the sum over its rows of factors[row][weight row] * operand[row][column].
template <class Gradient, class T>
void differentiate_weight(const ExpertGroup& group, const float* factors, int64_t weight_rows, const T* operand,
                          int64_t width, int64_t column, int64_t columns, const ExpertMatrices<void>& gradient) {
  if (gradient.data == nullptr) return;
  Gradient* matrix = static_cast<Gradient*>(gradient.data) + group.expert * gradient.stride + column;
  for_each_tile(0, weight_rows, [&](int64_t first, int64_t count) {
    Tile tile = {};
    FactorRows packed;
    for (int64_t row = 0; row < count; ++row) prefetch_row(matrix + (first + row) * width, columns);
    for (int64_t row = group.begin; row < group.end; row += kPanelLength) {
      const int64_t length = smaller(kPanelLength, group.end - row);
      fill_factors(factors + row * weight_rows + first, weight_rows, length, count, packed);
      add_product({packed.rows[0], 1, kTileRows}, count, operand + row * width + column, width, columns, length,
                  row == group.begin, tile);
    }
    store_tile(tile, count, columns, matrix + first * width, width);
  });
}

// Calls body(TypeTag<T>{}, TypeTag<Gradient>{}) with the types of the operands and of the gradients of weights.
template <class Body>
inline void visit_gradient_types(const ExpertsBackwardArgs& args, Body&& body) {
  visit_dtype(args.dtype, [&](auto element) {
    if (args.rounded) {
      body(element, element);
    } else {
      body(element, TypeTag<float>{});
    }
  });
}

// Calls body(group, column, columns) for units of blocks of [0, width).
template <class Body>
inline void for_each_gradient_unit(const ExpertsBackwardArgs& args, int64_t width, int64_t begin, int64_t end,
                                   Body&& body) {
  for_each_unit(args.group_count, begin, end, [&](int64_t group, int64_t block) {
    const int64_t column = block * kGradientBlock;
    body(args.groups[group], column, smaller(kGradientBlock, width - column));
  });
}

}  // namespace

void experts_grad_activated(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for_each_gradient_unit(args, args.intermediate, begin, end,
                           [&](const ExpertGroup& group, int64_t column, int64_t columns) {
                             differentiate_group<T>(args, group, column, columns);
                           });
  });
}

void experts_grad_input(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    for_each_gradient_unit(args, args.hidden, begin, end,
                           [&](const ExpertGroup& group, int64_t column, int64_t columns) {
                             project_group_back<T>(args, group, column, columns);
                           });
  });
}

void experts_grad_gate_up(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  visit_gradient_types(args, [&](auto element, auto gradient) {
    using Gradient = typename decltype(gradient)::type;
    const auto* input = static_cast<const typename decltype(element)::type*>(args.input);
    for_each_gradient_unit(args, args.hidden, begin, end,
                           [&](const ExpertGroup& group, int64_t column, int64_t columns) {
                             differentiate_weight<Gradient>(group, args.grad_gate_projection, args.intermediate, input,
                                                            args.hidden, column, columns, args.grad_gate);
                             differentiate_weight<Gradient>(group, args.grad_up_projection, args.intermediate, input,
                                                            args.hidden, column, columns, args.grad_up);
                           });
  });
}

void experts_grad_down(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  visit_gradient_types(args, [&](auto, auto gradient) {
    using Gradient = typename decltype(gradient)::type;
    for_each_gradient_unit(args, args.intermediate, begin, end,
                           [&](const ExpertGroup& group, int64_t column, int64_t columns) {
                             differentiate_weight<Gradient>(group, args.wide_grad, args.hidden, args.activated,
                                                            args.intermediate, column, columns, args.grad_down);
                           });
  });
}

}  // namespace rudnn::RUDNN_ISA
