#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "cpu/amx_tiles.inl.h"
#include "cpu/experts.h"
#include "cpu/silu.inl.h"

// Sums have a row for each row of the group, or of a weight's gradient. Weights are packed to right tiles on the way,
// a panel of 32 columns at a time; what the gradients of weights sum over rows is packed by blocks of rows, transposed
// to left tiles or paired to right ones, a tile for every 16 features.
namespace rudnn::amx {
namespace {

inline constexpr int64_t kColumns = 32;  // of a panel

inline int64_t tiles_of(int64_t features) { return ceil_div(features, kColumns) * 2; }

inline __m256i load_half(const bfloat16* row) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)); }

// Elements [column, column + 16) of a row, 0 from `columns` on or if there is no such row.
inline __m256i load_half(const bfloat16* row, bool there, int64_t column, int64_t columns) {
  const int64_t count = there ? larger(smaller(columns - column, 16), 0) : 0;
  return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), row + column);
}

// Packs a matrix of `rows` rows to right tiles of 16 columns from `column` on: a row of pairs for every two rows.
inline void pack_pairs(const bfloat16* matrix, int64_t stride, int64_t rows, int64_t column, int64_t columns,
                       __m512i (&pairs)[16]) {
#pragma GCC unroll 16
  for (int64_t pair = 0; pair < 16; ++pair) {
    const bfloat16* row = matrix + 2 * pair * stride;
    pairs[pair] = pair_up(load_half(row, 2 * pair < rows, column, columns),
                          load_half(row + stride, 2 * pair + 1 < rows, column, columns));
  }
}

// A panel of 32 columns of a weight: for every 32 of its rows, two right tiles.
void pack_panel(const bfloat16* matrix, int64_t rows, int64_t column, int64_t columns, bfloat16* panel) {
  constexpr int64_t kAhead = 64;  // rows, each of which lies in another page
  const bool whole = column + kColumns <= columns;
  for (int64_t first = 0; first < rows; first += kDepth) {
    const bfloat16* corner = matrix + first * columns + column;
    bfloat16* tiles = panel + first * kColumns;
    if (whole && first + kDepth <= rows) {
      for (int64_t pair = 0; pair < 16; ++pair) {
        const bfloat16* even = corner + 2 * pair * columns;
        const bfloat16* odd = even + columns;
        __builtin_prefetch(even + kAhead * columns, 0, 3);
        __builtin_prefetch(odd + kAhead * columns, 0, 3);
        _mm512_store_si512(tiles + 32 * pair, pair_up(load_half(even), load_half(odd)));
        _mm512_store_si512(tiles + kTileSize + 32 * pair, pair_up(load_half(even + 16), load_half(odd + 16)));
      }
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      __m512i pairs[16];
      pack_pairs(matrix + first * columns, columns, rows - first, column + 16 * half, columns, pairs);
      store_tile(pairs, tiles + half * kTileSize);
    }
  }
}

inline LeftTiles rows_to_multiply(const bfloat16* data, int64_t stride, int64_t rows, int64_t columns) {
  return {data, stride, kDepth, larger(smaller(rows, 16), 0), columns};
}

// Tiles that are packed as the tiles of blocks, of which the first is given.
inline LeftTiles packed_left(const bfloat16* tile, int64_t features, int64_t blocks) {
  return {tile, kDepth, packed_size(features), 16, blocks * kDepth};
}

constexpr auto kNothing = [] {};

// Pairs of rows of what the weights' gradients are made of, 16 columns.
struct PairedGradients {
  __m512i gate[16];
  __m512i up[16];
};

// Gradients of the projections in 32 rows and 16 columns.
struct GradientBlock {
  int64_t row;    // the first
  int64_t rows;   // that there are
  int64_t block;  // of rows
  int64_t column;
};

// Turns the sums, gradients of silu(gate) * up, into those of the projections.
template <class Lanes>
inline void differentiate_columns(const ExpertsBackwardArgs& args, const Sums& sums, const GradientBlock& at, int half,
                                  Lanes lanes) {
  const int64_t width = args.intermediate;
  const Vec zero = broadcast(0.0f);
  bfloat16* activated = block_of(args.right_activated, at.block, width) + at.column / 16 * kTileSize;
  PairedGradients paired;
  for (int64_t pair = 0; pair < 16; ++pair) {
    __m256i gates[2], ups[2], products[2];
    for (int64_t odd = 0; odd < 2; ++odd) {
      const int64_t row = 2 * pair + odd;
      Vec gate = zero, up = zero, upstream = zero;
      if (row < at.rows) {
        const int64_t offset = (at.row + row) * width + at.column;
        gate = load(static_cast<const bfloat16*>(args.gate_projection) + offset, lanes);
        up = load(static_cast<const bfloat16*>(args.up_projection) + offset, lanes);
        upstream = load(sums.tiles[row / 16 * 2 + half][row % 16], Full{});
      }
      const Vec silu = Silu::value(gate);
      gates[odd] = narrow(keep(upstream * up * Silu::slope(gate), lanes, zero));
      ups[odd] = narrow(keep(upstream * silu, lanes, zero));
      products[odd] = narrow(silu * up);
      const int64_t offset = row * tiles_of(width) * 16 + at.column;
      const auto store_row = [&](void* rows, __m256i values) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(block_of(rows, at.block, width) + offset), values);
      };
      store_row(args.grad_gate_rows, gates[odd]);
      store_row(args.grad_up_rows, ups[odd]);
    }
    paired.gate[pair] = pair_up(gates[0], gates[1]);
    paired.up[pair] = pair_up(ups[0], ups[1]);
    _mm512_store_si512(activated + 32 * pair, pair_up(products[0], products[1]));
  }
  transpose(paired.gate);
  transpose(paired.up);
  store_tile(paired.gate, block_of(args.left_grad_gate, at.block, width) + at.column / 16 * kTileSize);
  store_tile(paired.up, block_of(args.left_grad_up, at.block, width) + at.column / 16 * kTileSize);
}

void differentiate_block(const ExpertsBackwardArgs& args, const Sums& sums, GradientBlock at) {
  for (int half = 0; half < 2; ++half, at.column += 16) {
    const int64_t count = smaller(args.intermediate - at.column, 16);
    if (count == 16) {
      differentiate_columns(args, sums, at, half, Full{});
    } else {
      differentiate_columns(args, sums, at, half, Partial{static_cast<int>(larger(count, 0))});
    }
  }
}

// Stores what there is of 32 rows by 32 columns.
template <class T>
inline void store_sums_at(const Sums& sums, int64_t rows, int64_t columns, T* output, int64_t stride) {
  for (int64_t row = 0; row < smaller(rows, 32); ++row) {
    const float* left = sums.tiles[row / 16 * 2][row % 16];
    const float* right = sums.tiles[row / 16 * 2 + 1][row % 16];
    T* elements = output + row * stride;
    if constexpr (sizeof(T) == 2) {
      if (columns >= kColumns) {
        const __m256i halves[] = {narrow(load(left, Full{})), narrow(load(right, Full{}))};
        _mm512_storeu_si512(elements, _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1));
        continue;
      }
    }
    for_each_vector(smaller(columns, 16), [&](int64_t, auto lanes) { store(elements, load(left, Full{}), lanes); });
    for_each_vector(larger(smaller(columns - 16, 16), 0),
                    [&](int64_t, auto lanes) { store(elements + 16, load(right, Full{}), lanes); });
  }
}

// Rows [first, first + 32) of the gradient of a weight: the sums over the group's rows of what left has for a row and
// right for a column.
template <class T>
void differentiate_weight(const ExpertGroup& group, const void* left, int64_t left_features, int64_t first,
                          const void* right, int64_t right_features, const ExpertMatrices<void>& gradient) {
  if (gradient.data == nullptr) return;
  T* rows = static_cast<T*>(gradient.data) + group.expert * gradient.stride + first * right_features;
  const int64_t count = smaller(left_features - first, 32);
  const int64_t blocks = block_count(group);
  if (blocks == 0) {
    for_each_vector(count * right_features, [&](int64_t i, auto lanes) { store(rows + i, broadcast(0.0f), lanes); });
    return;
  }
  const bfloat16* tile = block_of(const_cast<void*>(left), group.first_block, left_features) + first / 16 * kTileSize;
  const LeftTiles left0 = packed_left(tile, left_features, blocks);
  const LeftTiles left1 = packed_left(tile + kTileSize, left_features, blocks);
  for (int64_t column = 0; column < right_features; column += kColumns) {
    const bfloat16* operand =
        block_of(const_cast<void*>(right), group.first_block, right_features) + column / 16 * kTileSize;
    clear_tiles();
    add_product<true>(left0, left1, {operand, packed_size(right_features)}, blocks, {}, kNothing);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (count == 32 && column + kColumns <= right_features) {
        float* corner = rows + column;
        _tile_stored(0, corner, 4 * right_features);
        _tile_stored(1, corner + 16, 4 * right_features);
        _tile_stored(2, corner + 16 * right_features, 4 * right_features);
        _tile_stored(3, corner + 16 * right_features + 16, 4 * right_features);
        continue;
      }
    }
    Sums sums;
    store_sums(true, sums);
    store_sums_at(sums, count, right_features - column, rows + column, right_features);
  }
}

// Calls body(TypeTag<T>{}) with the type of the gradients of weights.
template <class Body>
inline void visit_gradient_type(const ExpertsBackwardArgs& args, Body&& body) {
  if (args.rounded) {
    body(TypeTag<bfloat16>{});
  } else {
    body(TypeTag<float>{});
  }
}

}  // namespace

void experts_grad_pack(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.hidden;
  for (int64_t g = 0; g < args.group_count; ++g) {
    const ExpertGroup& group = args.groups[g];
    const int64_t last = smaller(end, group.first_block + block_count(group));
    for (int64_t block = larger(begin, group.first_block); block < last; ++block) {
      const int64_t row = group.begin + (block - group.first_block) * kRowBlock;
      for (int64_t column = 0; column < tiles_of(hidden) * 16; column += 16) {
        const int64_t tile = column / 16 * kTileSize;
        __m512i pairs[16];
        pack_pairs(static_cast<const bfloat16*>(args.input) + row * hidden, hidden, group.end - row, column, hidden,
                   pairs);
        store_tile(pairs, block_of(args.right_input, block, hidden) + tile);
        pack_pairs(static_cast<const bfloat16*>(args.grad) + row * hidden, hidden, group.end - row, column, hidden,
                   pairs);
        transpose(pairs);
        store_tile(pairs, block_of(args.left_grad, block, hidden) + tile);
      }
    }
  }
}

void experts_grad_activated(const ExpertsBackwardArgs& args, void* panel, int64_t begin, int64_t end) {
  configure_tiles();
  auto* down = static_cast<bfloat16*>(panel);
  const int64_t hidden = args.hidden;
  for_each_unit(args.group_count, begin, end, [&](int64_t g, int64_t unit) {
    const ExpertGroup& group = args.groups[g];
    if (group.begin == group.end) return;
    pack_panel(matrix_of(args.down, group), hidden, unit * kColumns, args.intermediate, down);
    for (int64_t block = 0; block < block_count(group); ++block) {
      const int64_t row = group.begin + block * kRowBlock;
      const auto* grad = static_cast<const bfloat16*>(args.grad) + row * hidden;
      clear_tiles();
      // Rows of other groups may be multiplied too; nobody looks at their sums.
      add_product<true>(rows_to_multiply(grad, hidden, args.rows - row, hidden),
                        rows_to_multiply(grad + 16 * hidden, hidden, args.rows - row - 16, hidden),
                        {down, 2 * kTileSize}, ceil_div(hidden, kDepth), {}, kNothing);
      Sums sums;
      store_sums(true, sums);
      differentiate_block(args, sums, {row, group.end - row, group.first_block + block, unit * kColumns});
    }
  });
  release_tiles();
}

void experts_grad_input(const ExpertsBackwardArgs& args, void* panels, int64_t begin, int64_t end) {
  configure_tiles();
  const int64_t width = args.intermediate;
  const int64_t padded = tiles_of(width) * 16;
  auto* gate = static_cast<bfloat16*>(panels);
  auto* up = gate + packed_size(width);
  for_each_unit(args.group_count, begin, end, [&](int64_t g, int64_t unit) {
    const ExpertGroup& group = args.groups[g];
    if (group.begin == group.end) return;
    const int64_t column = unit * kColumns;
    pack_panel(matrix_of(args.gate, group), width, column, args.hidden, gate);
    pack_panel(matrix_of(args.up, group), width, column, args.hidden, up);
    for (int64_t block = 0; block < block_count(group); ++block) {
      const auto add_rows = [&](void* packed_rows, const bfloat16* panel) {
        const bfloat16* rows = block_of(packed_rows, group.first_block + block, width);
        add_product<true>(rows_to_multiply(rows, padded, 16, padded),
                          rows_to_multiply(rows + 16 * padded, padded, 16, padded), {panel, 2 * kTileSize},
                          padded / kDepth, {}, kNothing);
      };
      clear_tiles();
      add_rows(args.grad_gate_rows, gate);
      add_rows(args.grad_up_rows, up);
      Sums sums;
      store_sums(true, sums);
      const int64_t row = group.begin + block * kRowBlock;
      store_sums_at(sums, group.end - row, args.hidden - column,
                    static_cast<bfloat16*>(args.grad_input) + row * args.hidden + column, args.hidden);
    }
  });
  release_tiles();
}

void experts_grad_gate_up(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  configure_tiles();
  visit_gradient_type(args, [&](auto element) {
    using T = typename decltype(element)::type;
    for_each_unit(args.group_count, begin, end, [&](int64_t g, int64_t unit) {
      differentiate_weight<T>(args.groups[g], args.left_grad_gate, args.intermediate, unit * kColumns, args.right_input,
                              args.hidden, args.grad_gate);
      differentiate_weight<T>(args.groups[g], args.left_grad_up, args.intermediate, unit * kColumns, args.right_input,
                              args.hidden, args.grad_up);
    });
  });
  release_tiles();
}

void experts_grad_down(const ExpertsBackwardArgs& args, int64_t begin, int64_t end) {
  configure_tiles();
  visit_gradient_type(args, [&](auto element) {
    using T = typename decltype(element)::type;
    for_each_unit(args.group_count, begin, end, [&](int64_t g, int64_t unit) {
      differentiate_weight<T>(args.groups[g], args.left_grad, args.hidden, unit * kColumns, args.right_activated,
                              args.intermediate, args.grad_down);
    });
  });
  release_tiles();
}

}  // namespace rudnn::amx
#endif
