#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "cpu/amx_tiles.inl.h"
#include "cpu/experts.h"
#include "cpu/silu.inl.h"

// Rows of weights are left tiles as they lie in memory, tokens are packed to right tiles, and a sum has a feature for
// each row and a token for each column; so two rows of silu(gate x) * (up x) make pairs for the next product.
//
// Activations are packed by blocks of rows: step after step of 32 features, each a right tile for the first 16 rows and
// one for the others, which is not written if there are none. Where a group has fewer rows than a tile has columns, a
// step is a tile of just these columns, so that a few tokens stay in the first cache while weights stream through.
namespace rudnn::amx {
namespace {

// What a block holds of its group.
struct BlockRows {
  int64_t first;
  int64_t count;
  int64_t columns;  // of a right tile
};

inline int64_t columns_of(const ExpertGroup& group) { return smaller(group.end - group.begin, 16); }

inline BlockRows rows_of(const ExpertGroup& group, int64_t block) {
  const int64_t first = group.begin + (block - group.first_block) * kRowBlock;
  return {first, smaller(kRowBlock, group.end - first), columns_of(group)};
}

inline int64_t half_rows(BlockRows rows, int half) { return larger(smaller(rows.count - 16 * half, 16), 0); }

// Elements of a step.
inline int64_t step_size(BlockRows rows) { return rows.columns == 16 ? 2 * kTileSize : kDepth * rows.columns; }

// The tile of a half of the rows of a block, in the step of a feature.
inline bfloat16* right_tile(bfloat16* packed, BlockRows rows, int64_t feature, int half) {
  return packed + feature / kDepth * step_size(rows) + half * kTileSize;
}

inline void store_pairs(__m512i pairs, bfloat16* tile, BlockRows rows, int64_t row) {
  _mm512_mask_storeu_epi32(tile + row * 2 * rows.columns, mask_of(Partial{static_cast<int>(rows.columns)}), pairs);
}

// What is packed of a group of several blocks passes by the caches: much else will be read before it.
void pack_block(const ExpertsArgs& args, BlockRows rows, bool several_blocks, bfloat16* packed) {
  for (int half = 0; half < 2; ++half) {
    const int64_t count = half_rows(rows, half);
    if (count == 0) return;
    const bfloat16* sources[16];
    for (int64_t row = 0; row < count; ++row) {
      const int64_t source = rows.first + 16 * half + row;
      const int64_t input_row = args.sums != nullptr ? args.row_tokens[source] : source;
      sources[row] = static_cast<const bfloat16*>(args.input) + input_row * args.hidden;
    }
    for (int64_t feature = 0; feature < args.hidden; feature += kDepth) {
      __m512i elements[16];
      for (int64_t row = 0; row < 16; ++row) {
        elements[row] = row < count ? load_row(sources[row], feature, args.hidden) : _mm512_setzero_si512();
      }
      transpose(elements);
      bfloat16* tile = right_tile(packed, rows, feature, half);
      for (int64_t row = 0; row < 16; ++row) {
        if (several_blocks) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(tile + 32 * row), elements[row]);
        } else {
          store_pairs(elements[row], tile, rows, row);
        }
      }
    }
  }
}

// What is left to do with the sums of one block while the tiles work on the next: parts [next, count).
class Leftover {
 public:
  void start(int count) {
    next_ = 0;
    count_ = count;
  }
  template <class Part>
  void do_one(Part&& part) {
    if (next_ < count_) part(next_++);
  }
  template <class Part>
  void do_all(Part&& part) {
    while (next_ < count_) part(next_++);
  }

 private:
  int next_ = 0;
  int count_ = 0;
};

inline LeftTiles weight_rows(const ExpertMatrices<const void>& matrices, const ExpertGroup& group, int64_t first,
                             int64_t last, int64_t columns) {
  return {matrix_of(matrices, group) + first * columns, columns, kDepth,
          larger(smaller(last - first, 16), 0),         columns, block_count(group) == 1};
}

// The weights of a unit.
struct UnitWeights {
  LeftTiles left0;
  LeftTiles left1;
};

// Steps of a unit's weights that the first cache holds, 2 KiB each, besides what passes through.
inline constexpr int64_t kCachedSteps = 16;

// Steps of the next unit's weights that the only block of a group fetches while it finishes: its own loads are as fast
// as the memory, and fetching more is in their way.
inline constexpr int64_t kStepsAhead = 2;

// What a block fetches of the weights of the unit that comes next, if there is one: a part of the rows where several
// blocks of a group load the same weights, and but the first steps, at its end, where it is the only one.
inline ComingRows coming_rows(const UnitWeights* next, const ExpertGroup& group, int64_t block, int64_t steps) {
  if (next == nullptr) return {};
  const int64_t blocks = block_count(group);
  const int64_t part = block - group.first_block;
  const int64_t rows = smaller(next->left0.rows, next->left1.rows);
  ComingRows coming;
  coming.data0 = next->left0.data;
  coming.data1 = next->left1.data;
  coming.row_stride = next->left0.row_stride;
  coming.first = rows * part / blocks;
  coming.last = rows * (part + 1) / blocks;
  if (blocks == 1) coming.first_step = larger(steps - kStepsAhead, 0);
  return coming;
}

// Tiles as wide as a group needs.
class TileSession {
 public:
  TileSession() = default;
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  ~TileSession() {
    if (columns_ != 0) release_tiles();
  }
  void configure(const ExpertGroup& group) {
    const int64_t columns = columns_of(group);
    if (columns != columns_) configure_tiles(kNarrowTiles, columns);
    columns_ = columns;
  }

 private:
  int64_t columns_ = 0;
};

// Columns of a tile of sums become rows: those of `count` rows of a matrix, from `feature` on.
template <class Store>
inline void for_each_column(const float (&tile)[16][16], int64_t count, Store&& store_column) {
  __m512i rows[16];
  for (int row = 0; row < 16; ++row) rows[row] = _mm512_load_si512(tile[row]);
  transpose(rows);
  for (int64_t column = 0; column < count; ++column) store_column(column, Vec{_mm512_castsi512_ps(rows[column])});
}

// Features [feature, feature + 16) of activations.
struct ActivatedBlock {
  BlockRows rows;
  int64_t feature;
  int64_t count;
  bfloat16* packed;  // the right tiles of the block
};

// Two features of 16 rows.
inline void store_activated(const Sums& sums, const ActivatedBlock& block, int part) {
  const int half = part / 8;
  const int row = part % 8 * 2;
  // What the intermediate size does not have must be 0 also where a token holds inf.
  const auto activated = [&](int feature) {
    if (feature >= block.count) return _mm256_setzero_si256();
    return narrow(Silu::value(load(sums.tiles[half][feature], Full{})) * load(sums.tiles[2 + half][feature], Full{}));
  };
  bfloat16* tile = right_tile(block.packed, block.rows, block.feature, half);
  store_pairs(pair_up(activated(row), activated(row + 1)), tile, block.rows, (block.feature % kDepth + row) / 2);
}

// The features up to a multiple of 32 that the intermediate size does not have.
inline void clear_missing(const ExpertsArgs& args, const ActivatedBlock& block) {
  if (block.feature % kDepth != 0 || block.feature + 16 < args.intermediate) return;
  for (int half = 0; half < 2 && half_rows(block.rows, half) > 0; ++half) {
    bfloat16* tile = right_tile(block.packed, block.rows, block.feature, half);
    for (int64_t row = 8; row < 16; ++row) store_pairs(_mm512_setzero_si512(), tile, block.rows, row);
  }
}

inline void store_projections(const ExpertsArgs& args, const Sums& sums, const ActivatedBlock& block) {
  const auto store_half = [&](const float (&tile)[16][16], int half, void* projection) {
    for_each_column(tile, half_rows(block.rows, half), [&](int64_t column, Vec values) {
      const int64_t row = block.rows.first + 16 * half + column;
      auto* features = static_cast<bfloat16*>(projection) + row * args.intermediate + block.feature;
      for_each_vector(block.count, [&](int64_t, auto lanes) { store(features, values, lanes); });
    });
  };
  for (int half = 0; half < 2; ++half) {
    store_half(sums.tiles[half], half, args.gate_projection);
    store_half(sums.tiles[2 + half], half, args.up_projection);
  }
}

// The sums of a block of rows. Where several blocks need weights that fit into the first cache, packed rows pass by it.
template <class Between>
inline void multiply(const UnitWeights& weights, BlockRows rows, bool several_blocks, bfloat16* packed, int64_t steps,
                     const ComingRows& coming, Between&& between) {
  const RightTiles right = {packed, step_size(rows), rows.columns, several_blocks && steps <= kCachedSteps};
  clear_tiles();
  if (rows.count > 16) {
    add_product<true>(weights.left0, weights.left1, right, steps, coming, between);
  } else {
    add_product<false>(weights.left0, weights.left1, right, steps, coming, between);
  }
}

// A block of 32 features of the output for 32 rows.
struct OutputBlock {
  BlockRows rows;
  int64_t feature;
};

// Half of the features of 16 rows.
inline void store_output(const ExpertsArgs& args, const Sums& sums, const OutputBlock& block, int part) {
  const int half = part % 2;
  const int64_t feature = block.feature + part / 2 * 16;
  const int64_t count = smaller(args.hidden - feature, 16);
  if (count <= 0) return;
  for_each_column(sums.tiles[part / 2 * 2 + half], half_rows(block.rows, half), [&](int64_t column, Vec values) {
    const int64_t row = block.rows.first + 16 * half + column;
    if (args.sums == nullptr) {
      auto* output = static_cast<bfloat16*>(args.output) + row * args.hidden + feature;
      for_each_vector(count, [&](int64_t, auto lanes) { store(output, values, lanes); });
    } else {
      float* sum = args.sums + args.row_tokens[row] * args.sum_stride + feature;
      store(sum, fma(values, broadcast(args.row_weights[row]), load(sum, Full{})), Full{});
    }
  });
}

inline void prefetch_sums(const ExpertsArgs& args, const OutputBlock& block) {
  for (int64_t row = block.rows.first; row < block.rows.first + block.rows.count; ++row) {
    const float* sum = args.sums + args.row_tokens[row] * args.sum_stride + block.feature;
    __builtin_prefetch(sum);
    __builtin_prefetch(sum + 16);
  }
}

// Features [first, last) of every token.
inline void clear_sums(const ExpertsArgs& args, int64_t first, int64_t last) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    float* sum = args.sums + token * args.sum_stride;
    for (int64_t i = first; i < last; i += 16) store(sum + i, broadcast(0.0f), Full{});
  }
}

inline void round_sums(const ExpertsArgs& args, int64_t first, int64_t last) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    const float* sum = args.sums + token * args.sum_stride + first;
    auto* output = static_cast<bfloat16*>(args.output) + token * args.hidden + first;
    for_each_vector(last - first, [&](int64_t i, auto lanes) { store(output + i, load(sum + i, lanes), lanes); });
  }
}

}  // namespace

void experts_pack(const ExpertsArgs& args, int64_t begin, int64_t end) {
  for (int64_t g = 0; g < args.group_count; ++g) {
    const ExpertGroup& group = args.groups[g];
    for (int64_t block = larger(begin, group.first_block); block < smaller(end, group.first_block + block_count(group));
         ++block) {
      pack_block(args, rows_of(group, block), block_count(group) > 1, block_of(args.packed_input, block, args.hidden));
    }
  }
  _mm_sfence();
}

void experts_activated(const ExpertsArgs& args, int64_t begin, int64_t end) {
  TileSession session;
  Sums sums = {};
  ActivatedBlock pending;
  Leftover leftover;
  const auto store_part = [&](int part) { store_activated(sums, pending, part); };
  const int64_t steps = ceil_div(args.hidden, kDepth);
  constexpr int64_t kFeatures = kTileBlock / 2;
  const auto weights_of = [&](int64_t g, int64_t unit) {
    const auto rows_from = [&](const ExpertMatrices<const void>& matrices) {
      return weight_rows(matrices, args.groups[g], unit * kFeatures, args.intermediate, args.hidden);
    };
    return UnitWeights{rows_from(args.gate), rows_from(args.up)};
  };
  const auto units_of = [&](int64_t g) { return units_of_group(g, args.group_count, begin, end); };
  for_each_unit(args.group_count, begin, end, [&](int64_t g, int64_t unit) {
    const ExpertGroup& group = args.groups[g];
    const bool several_blocks = block_count(group) > 1;
    const UnitWeights weights = weights_of(g, unit);
    int64_t next_group = g;
    int64_t next_unit = unit + 1;
    while (next_group < args.group_count && next_unit == units_of(next_group).last) {
      ++next_group;
      next_unit = units_of(next_group).first;
    }
    const bool has_next = next_group < args.group_count;
    const UnitWeights next = has_next ? weights_of(next_group, next_unit) : UnitWeights();
    session.configure(group);
    for (int64_t block = group.first_block; block < group.first_block + block_count(group); ++block) {
      const BlockRows rows = rows_of(group, block);
      multiply(weights, rows, several_blocks, block_of(args.packed_input, block, args.hidden), steps,
               coming_rows(has_next ? &next : nullptr, group, block, steps), [&] { leftover.do_one(store_part); });
      leftover.do_all(store_part);
      store_sums(rows.count > 16, sums);
      pending = {rows, unit * kFeatures, weights.left0.rows, block_of(args.activated, block, args.intermediate)};
      leftover.start(rows.count > 16 ? 16 : 8);
      clear_missing(args, pending);
      if (args.gate_projection != nullptr) store_projections(args, sums, pending);
    }
  });
  leftover.do_all(store_part);
}

void experts_output(const ExpertsArgs& args, int64_t begin, int64_t end) {
  TileSession session;
  Sums sums = {};
  OutputBlock pending;
  Leftover leftover;
  const auto store_part = [&](int part) { store_output(args, sums, pending, part); };
  const int64_t steps = ceil_div(args.intermediate, kDepth);
  const int64_t first = begin * kTileBlock;
  const int64_t last = smaller(end * kTileBlock, args.hidden);
  const auto weights_of = [&](int64_t g, int64_t feature) {
    const auto rows_from = [&](int64_t row) {
      return weight_rows(args.down, args.groups[g], row, args.hidden, args.intermediate);
    };
    return UnitWeights{rows_from(feature), rows_from(feature + 16)};
  };
  if (args.sums != nullptr) clear_sums(args, first, last);
  for (int64_t g = 0; g < args.group_count; ++g) {
    const ExpertGroup& group = args.groups[g];
    const bool several_blocks = block_count(group) > 1;
    session.configure(group);
    for (int64_t feature = first; feature < last; feature += kTileBlock) {
      const UnitWeights weights = weights_of(g, feature);
      const bool last_of_group = feature + kTileBlock >= last;
      const bool has_next = !last_of_group || g + 1 < args.group_count;
      const UnitWeights next = !has_next       ? UnitWeights()
                               : last_of_group ? weights_of(g + 1, first)
                                               : weights_of(g, feature + kTileBlock);
      for (int64_t block = group.first_block; block < group.first_block + block_count(group); ++block) {
        const BlockRows rows = rows_of(group, block);
        if (args.sums != nullptr) prefetch_sums(args, {rows, feature});
        multiply(weights, rows, several_blocks, block_of(args.activated, block, args.intermediate), steps,
                 coming_rows(has_next ? &next : nullptr, group, block, steps), [&] { leftover.do_one(store_part); });
        leftover.do_all(store_part);
        store_sums(rows.count > 16, sums);
        pending = {rows, feature};
        leftover.start(4);
      }
    }
  }
  leftover.do_all(store_part);
  if (args.sums != nullptr) round_sums(args, first, last);
}

}  // namespace rudnn::amx
#endif
