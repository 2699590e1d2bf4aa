// experts: down(silu(gate x) * (up x)) for the rows of each expert, and the gradients.
#include "common/metal/instance.h"
#include "common/metal/tile.h"
#include "metal/experts_args.h"
#include "metal/row_plan.h"
#include "ops/activation_math.h"

using namespace metal;
using namespace rudnn;

constant bool kAligned [[function_constant(kAlignedConstant)]];
constant bool kGathers [[function_constant(kGathersConstant)]];
constant bool kTraining [[function_constant(kTrainingConstant)]];
constant bool kWantsHidden [[function_constant(kWantsHiddenConstant)]];

template <typename T, bool kMatrixUnits>
struct ProductOf {
  using type = ScalarProduct<T>;
};
template <typename T>
struct ProductOf<T, true> {
  using type = MatrixProduct<T, 2>;
};

inline int within(int offset, long rows) { return int(max(0l, min(long(offset), rows))); }

// First rows and first tiles of the experts (RowPlan). One simdgroup. Offsets are clamped, and one below an earlier one
// counts as equal to it, so that no row belongs to two experts.
[[kernel, max_total_threads_per_threadgroup(kPlanThreads)]] void plan_rows(
    constant PlanArgs& args [[buffer(kArgsBuffer)]], device const int* offsets [[buffer(kExpertOffsetsBuffer)]],
    device int* plan [[buffer(kPlanBuffer)]], uint lane [[thread_index_in_simdgroup]]) {
  device int* first_rows = plan;
  device int* first_tiles = plan + args.experts + 1;
  int row = within(offsets[0], args.rows);
  int tile = 0;
  for (int chunk = 0; chunk < args.experts; chunk += kPlanThreads) {
    const int expert = chunk + lane;
    int end = expert < args.experts ? within(offsets[expert + 1], args.rows) : 0;
    end = max(end, row);
    for (ushort distance = 1; distance < kPlanThreads; distance *= 2) {
      const int earlier = simd_shuffle_up(end, distance);
      if (lane >= distance) end = max(end, earlier);
    }
    const int before = simd_shuffle_up(end, ushort(1));
    const int start = lane == 0 ? row : before;
    const int tiles = (end - start + kTileRows - 1) / kTileRows;
    const int first_tile = tile + simd_prefix_exclusive_sum(tiles);
    if (expert < args.experts) {
      first_rows[expert] = start;
      first_tiles[expert] = first_tile;
    }
    row = simd_max(end);
    tile += simd_sum(tiles);
  }
  if (lane != 0) return;
  first_rows[args.experts] = row;
  first_tiles[args.experts] = tile;
}

// Zeros for the rows of no expert, before the first one's and after the last one's.
template <typename T>
[[kernel]] void zero_rows(constant ZeroArgs& args [[buffer(kArgsBuffer)]],
                          device const int* plan [[buffer(kPlanBuffer)]], device T* result [[buffer(kResultBuffer)]],
                          uint index [[thread_position_in_grid]], uint threads [[threads_per_grid]]) {
  const RowPlan rows = plan_at(plan, args.experts);
  const long before = rows.first_rows[0] * args.width;
  const long end = rows.first_rows[args.experts] * args.width;
  for (long element = index; element < before; element += threads) result[element] = T(0.0f);
  for (long element = end + index; element < args.rows * args.width; element += threads) result[element] = T(0.0f);
}

// Where the elements of a thread lie in a matrix of rows, and which of them exist.
struct Place {
  long row;
  long column;
  long offset;
  bool exists;
};

template <typename Product>
inline Place place_of(int element, uint index, RowTile tile, long first_column, long width) {
  const long row = tile.first + Product::row_of(element, index);
  const long column = first_column + Product::column_of(element, index);
  return {row, column, row * width + column, row < tile.end && column < width};
}

// hidden = silu(values gate^T) * (values up^T)
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_hidden(
    constant RowProductArgs& args [[buffer(kArgsBuffer)]], device const int* plan [[buffer(kPlanBuffer)]],
    device const T* values [[buffer(kRowsBuffer)]],
    device const int* row_tokens [[buffer(kRowTokensBuffer), function_constant(kGathers)]],
    device const T* gate [[buffer(kWeightBuffer)]], device const T* up [[buffer(kSecondWeightBuffer)]],
    device T* hidden [[buffer(kResultBuffer)]],
    device T* gate_projection [[buffer(kGateProjectionBuffer), function_constant(kTraining)]],
    device T* up_projection [[buffer(kUpProjectionBuffer), function_constant(kTraining)]],
    uint2 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Left = Tile<T, kTileRows, true>;
  using Right = Tile<T, kTileColumns, true>;
  using Product = typename ProductOf<T, kMatrixUnits>::type;
  threadgroup T left[Left::kSize];
  threadgroup T gate_tile[Right::kSize];
  threadgroup T up_tile[Right::kSize];
  const RowPlan rows = plan_at(plan, args.experts);
  if (int(group.y) >= rows.tiles()) return;
  const RowTile tile = row_tile_of(rows, int(group.y), lane);
  const long column = long(group.x) * kTileColumns;
  const Lines<T> inputs = {values, args.depth, tile.end, args.depth, kGathers ? row_tokens : nullptr};
  const Lines<T> gates = {gate + tile.expert * args.weight_stride, args.depth, args.width, args.depth, nullptr};
  const Lines<T> ups = {up + tile.expert * args.second_weight_stride, args.depth, args.width, args.depth, nullptr};
  Product gate_product;
  Product up_product;
  gate_product.clear();
  up_product.clear();
  for (long depth = 0; depth < args.depth; depth += Left::kDepth) {
    Left::load(left, inputs, tile.first, depth, kAligned, index);
    Right::load(gate_tile, gates, column, depth, kAligned, index);
    Right::load(up_tile, ups, column, depth, kAligned, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    gate_product.template add<Left, Right>(left, gate_tile, index);
    up_product.template add<Left, Right>(left, up_tile, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next round writes the tiles again
  }
  for (int element = 0; element < Product::kElements; ++element) {
    const Place at = place_of<Product>(element, index, tile, column, args.width);
    if (!at.exists) continue;
    const float gate_value = gate_product.value(element);
    const float up_value = up_product.value(element);
    hidden[at.offset] = T(swiglu(gate_value, up_value));
    if (kTraining) {
      gate_projection[at.offset] = T(gate_value);
      up_projection[at.offset] = T(up_value);
    }
  }
}

// output = hidden down^T, of type Out
template <typename T, typename Out, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_output(
    constant RowProductArgs& args [[buffer(kArgsBuffer)]], device const int* plan [[buffer(kPlanBuffer)]],
    device const T* hidden [[buffer(kRowsBuffer)]], device const T* down [[buffer(kWeightBuffer)]],
    device Out* output [[buffer(kResultBuffer)]], uint2 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  using Left = Tile<T, kTileRows, true>;
  using Right = Tile<T, kTileColumns, true>;
  using Product = typename ProductOf<T, kMatrixUnits>::type;
  threadgroup T left[Left::kSize];
  threadgroup T right[Right::kSize];
  const RowPlan rows = plan_at(plan, args.experts);
  if (int(group.y) >= rows.tiles()) return;
  const RowTile tile = row_tile_of(rows, int(group.y), lane);
  const long column = long(group.x) * kTileColumns;
  const Lines<T> inputs = {hidden, args.depth, tile.end, args.depth, nullptr};
  const Lines<T> weights = {down + tile.expert * args.weight_stride, args.depth, args.width, args.depth, nullptr};
  Product product;
  product.clear();
  add_product(Operand<T, Left>{left, inputs, tile.first}, Operand<T, Right>{right, weights, column}, 0, args.depth,
              kAligned, index, product);
  for (int element = 0; element < Product::kElements; ++element) {
    const Place at = place_of<Product>(element, index, tile, column, args.width);
    if (at.exists) output[at.offset] = Out(product.value(element));
  }
}

// The gradient of hidden, grad down, turned into those of the projections; and hidden again.
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_hidden_backward(
    constant RowProductArgs& args [[buffer(kArgsBuffer)]], device const int* plan [[buffer(kPlanBuffer)]],
    device const T* grads [[buffer(kRowsBuffer)]], device const T* down [[buffer(kWeightBuffer)]],
    device const T* gate_projection [[buffer(kGateProjectionBuffer)]],
    device const T* up_projection [[buffer(kUpProjectionBuffer)]], device T* grad_gate [[buffer(kGradGateBuffer)]],
    device T* grad_up [[buffer(kGradUpBuffer)]],
    device T* hidden [[buffer(kResultBuffer), function_constant(kWantsHidden)]],
    uint2 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Left = Tile<T, kTileRows, true>;
  using Right = Tile<T, kTileColumns, false>;
  using Product = typename ProductOf<T, kMatrixUnits>::type;
  threadgroup T left[Left::kSize];
  threadgroup T right[Right::kSize];
  const RowPlan rows = plan_at(plan, args.experts);
  if (int(group.y) >= rows.tiles()) return;
  const RowTile tile = row_tile_of(rows, int(group.y), lane);
  const long column = long(group.x) * kTileColumns;
  const Lines<T> inputs = {grads, args.depth, tile.end, args.depth, nullptr};
  const Lines<T> weights = {down + tile.expert * args.weight_stride, args.width, args.depth, args.width, nullptr};
  Product product;
  product.clear();
  add_product(Operand<T, Left>{left, inputs, tile.first}, Operand<T, Right>{right, weights, column}, 0, args.depth,
              kAligned, index, product);
  for (int element = 0; element < Product::kElements; ++element) {
    const Place at = place_of<Product>(element, index, tile, column, args.width);
    if (!at.exists) continue;
    const float grad = product.value(element);
    const SwiGlu activated = swiglu_with_slopes(float(gate_projection[at.offset]), float(up_projection[at.offset]));
    grad_gate[at.offset] = T(grad * activated.gate_slope);
    grad_up[at.offset] = T(grad * activated.up_slope);
    if (kWantsHidden) hidden[at.offset] = T(activated.value);
  }
}

// grad_values = grad_gate gate + grad_up up
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_values_backward(
    constant RowProductArgs& args [[buffer(kArgsBuffer)]], device const int* plan [[buffer(kPlanBuffer)]],
    device const T* grad_gate [[buffer(kRowsBuffer)]], device const T* grad_up [[buffer(kSecondRowsBuffer)]],
    device const T* gate [[buffer(kWeightBuffer)]], device const T* up [[buffer(kSecondWeightBuffer)]],
    device T* grad_values [[buffer(kResultBuffer)]], uint2 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  using Left = Tile<T, kTileRows, true>;
  using Right = Tile<T, kTileColumns, false>;
  using Product = typename ProductOf<T, kMatrixUnits>::type;
  threadgroup T left[Left::kSize];
  threadgroup T right[Right::kSize];
  const RowPlan rows = plan_at(plan, args.experts);
  if (int(group.y) >= rows.tiles()) return;
  const RowTile tile = row_tile_of(rows, int(group.y), lane);
  const long column = long(group.x) * kTileColumns;
  const Lines<T> gate_grads = {grad_gate, args.depth, tile.end, args.depth, nullptr};
  const Lines<T> up_grads = {grad_up, args.depth, tile.end, args.depth, nullptr};
  const Lines<T> gates = {gate + tile.expert * args.weight_stride, args.width, args.depth, args.width, nullptr};
  const Lines<T> ups = {up + tile.expert * args.second_weight_stride, args.width, args.depth, args.width, nullptr};
  Product product;
  product.clear();
  add_product(Operand<T, Left>{left, gate_grads, tile.first}, Operand<T, Right>{right, gates, column}, 0, args.depth,
              kAligned, index, product);
  add_product(Operand<T, Left>{left, up_grads, tile.first}, Operand<T, Right>{right, ups, column}, 0, args.depth,
              kAligned, index, product);
  for (int element = 0; element < Product::kElements; ++element) {
    const Place at = place_of<Product>(element, index, tile, column, args.width);
    if (at.exists) grad_values[at.offset] = T(product.value(element));
  }
}

// grad_weight = grads^T rows, over the rows of each expert in their order
template <typename T, bool kMatrixUnits>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_weight_backward(
    constant WeightProductArgs& args [[buffer(kArgsBuffer)]], device const int* plan [[buffer(kPlanBuffer)]],
    device const T* grads [[buffer(kRowsBuffer)]], device const T* rows [[buffer(kSecondRowsBuffer)]],
    device void* grad_weight [[buffer(kResultBuffer)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]]) {
  using Left = Tile<T, kTileRows, false>;
  using Right = Tile<T, kTileColumns, false>;
  using Product = typename ProductOf<T, kMatrixUnits>::type;
  threadgroup T left[Left::kSize];
  threadgroup T right[Right::kSize];
  const int expert = int(group.z);
  const RowPlan experts = plan_at(plan, args.experts);
  const long first = experts.first_rows[expert];
  const long end = experts.first_rows[expert + 1];
  const RowTile tile = {expert, long(group.y) * kTileRows, args.height};
  const long column = long(group.x) * kTileColumns;
  const Lines<T> upstream = {grads, args.height, end, args.height, nullptr};
  const Lines<T> inputs = {rows, args.width, end, args.width, nullptr};
  Product product;
  product.clear();
  add_product(Operand<T, Left>{left, upstream, tile.first}, Operand<T, Right>{right, inputs, column}, first, end,
              kAligned, index, product);
  for (int element = 0; element < Product::kElements; ++element) {
    const Place at = place_of<Product>(element, index, tile, column, args.width);
    if (!at.exists) continue;
    const long offset = expert * args.gradient_stride + at.offset;
    if (args.rounded) {
      static_cast<device T*>(grad_weight)[offset] = T(product.value(element));
    } else {
      static_cast<device float*>(grad_weight)[offset] = product.value(element);
    }
  }
}

#define EXPERTS_INSTANCES(T, unit, kMatrixUnits)                                           \
  INSTANCE(experts_hidden_##unit##_##T, experts_hidden, T, kMatrixUnits)                   \
  INSTANCE(experts_output_##unit##_##T, experts_output, T, T, kMatrixUnits)                \
  INSTANCE(experts_hidden_backward_##unit##_##T, experts_hidden_backward, T, kMatrixUnits) \
  INSTANCE(experts_values_backward_##unit##_##T, experts_values_backward, T, kMatrixUnits) \
  INSTANCE(experts_weight_backward_##unit##_##T, experts_weight_backward, T, kMatrixUnits)
EXPERTS_INSTANCES(float, scalar, false)
EXPERTS_INSTANCES(half, scalar, false)
EXPERTS_INSTANCES(bfloat, scalar, false)
EXPERTS_INSTANCES(half, tensor_core, true)
EXPERTS_INSTANCES(bfloat, tensor_core, true)

// Results in float32, for sums that are rounded later; those of float are so anyway.
#define WIDE_INSTANCE(T, unit, kMatrixUnits) \
  INSTANCE(experts_wide_output_##unit##_##T, experts_output, T, float, kMatrixUnits)
WIDE_INSTANCE(half, scalar, false)
WIDE_INSTANCE(bfloat, scalar, false)
WIDE_INSTANCE(half, tensor_core, true)
WIDE_INSTANCE(bfloat, tensor_core, true)

INSTANCE(zero_rows_float, zero_rows, float)
INSTANCE(zero_rows_half, zero_rows, half)
INSTANCE(zero_rows_bfloat, zero_rows, bfloat)
