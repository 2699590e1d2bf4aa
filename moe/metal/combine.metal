// combine: the weighted sum of the rows of each token.
#include "common/metal/simdgroup.h"
#include "metal/combine_args.h"
#include "metal/elements.h"

using namespace metal;
using namespace rudnn;

constant int kWeightType [[function_constant(kWeightTypeConstant)]];

// T is the output's type, In that of the rows.
template <typename T, typename In, typename Shape>
[[kernel]] void combine(constant CombineArgs& args [[buffer(kArgsBuffer)]],
                        device const In* expert_output [[buffer(kExpertOutputBuffer)]],
                        device const void* weights [[buffer(kWeightsBuffer)]],
                        device const int* slot_rows [[buffer(kSlotRowsBuffer)]],
                        device T* output [[buffer(kOutputBuffer)]], uint2 position [[thread_position_in_grid]],
                        uint2 size [[threads_per_grid]]) {
  using Floats = typename Shape::Floats;
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long token = position.y; token < args.tokens; token += size.y) {
    Floats sum = Floats(0.0f);
    for (long slot = token * args.choices; slot < (token + 1) * args.choices; ++slot) {
      const long row = slot_rows[slot];
      if (row < 0 || row >= args.rows) continue;
      const Floats weight = Floats(element_at(weights, kWeightType, slot));
      sum = fma(weight, load_floats<Shape>(expert_output + row * args.width + column), sum);
    }
    store_floats<Shape>(output + token * args.width + column, sum);
  }
}

template <typename T, typename Shape>
[[kernel]] void combine_backward_rows(constant CombineArgs& args [[buffer(kArgsBuffer)]],
                                      device const T* grads [[buffer(kGradBuffer)]],
                                      device const void* weights [[buffer(kWeightsBuffer)]],
                                      device const int* row_slots [[buffer(kRowSlotsBuffer)]],
                                      device T* grad_expert_output [[buffer(kGradExpertOutputBuffer)]],
                                      uint2 position [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  using Floats = typename Shape::Floats;
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long row = position.y; row < args.rows; row += size.y) {
    const long slot = row_slots[row];
    Floats result = Floats(0.0f);
    if (slot >= 0 && slot < args.rows) {
      const long token = slot / args.choices;
      result = load_floats<Shape>(grads + token * args.width + column) * element_at(weights, kWeightType, slot);
    }
    store_floats<Shape>(grad_expert_output + row * args.width + column, result);
  }
}

inline float total(float x) { return x; }
inline float total(float4 x) { return (x.x + x.y) + (x.z + x.w); }

// The sum of products of the vectors `first`, `first + step`, ... of two rows. Runs of few vectors are summed by
// themselves, since the error of a sum grows with the number of its terms.
template <typename T, typename Shape>
inline float dot_product(device const T* a, device const T* b, long first, long step, long width) {
  using Floats = typename Shape::Floats;
  const long run = 32 * step;
  Floats sum = Floats(0.0f);
  for (long start = first * Shape::kVector; start < width; start += run * Shape::kVector) {
    Floats products = Floats(0.0f);
    for (long i = start; i < width && i < start + run * Shape::kVector; i += step * Shape::kVector)
      products = fma(load_floats<Shape>(a + i), load_floats<Shape>(b + i), products);
    sum += products;
  }
  return total(sum);
}

// kLanes threads, 1 or a simdgroup, share the dot product of a slot.
template <typename T, typename Shape, int kLanes>
[[kernel, max_total_threads_per_threadgroup(kDotThreads)]] void combine_backward_weights(
    constant CombineArgs& args [[buffer(kArgsBuffer)]], device const T* grads [[buffer(kGradBuffer)]],
    device const T* expert_output [[buffer(kExpertOutputBuffer)]],
    device const int* slot_rows [[buffer(kSlotRowsBuffer)]], device float* grad_weights [[buffer(kGradWeightsBuffer)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  const long slot = long(group) * (kDotThreads / kLanes) + index / kLanes;
  const uint lane = index % kLanes;
  if (slot >= args.rows) return;  // whole simdgroups, where their lanes share
  const long row = slot_rows[slot];
  float product = 0.0f;
  if (row >= 0 && row < args.rows) {
    device const T* grad = grads + slot / args.choices * args.width;
    product = dot_product<T, Shape>(grad, expert_output + row * args.width, lane, kLanes, args.width);
  }
  if (kLanes > 1) product = simdgroup_sum(product);
  if (lane == 0) grad_weights[slot] = product;
}

#define COMBINE_INSTANCES(T, In)                                   \
  INSTANCE(combine_##T##_of_##In##_x4, combine, T, In, Vectors<4>) \
  INSTANCE(combine_##T##_of_##In##_x1, combine, T, In, Vectors<1>)
COMBINE_INSTANCES(float, float)
COMBINE_INSTANCES(half, half)
COMBINE_INSTANCES(half, float)
COMBINE_INSTANCES(bfloat, bfloat)
COMBINE_INSTANCES(bfloat, float)

MATRIX_INSTANCES(combine_backward_rows, float)
MATRIX_INSTANCES(combine_backward_rows, half)
MATRIX_INSTANCES(combine_backward_rows, bfloat)

#define WEIGHTS_INSTANCES(T)                                                                     \
  INSTANCE(combine_backward_weights_serial_##T##_x4, combine_backward_weights, T, Vectors<4>, 1) \
  INSTANCE(combine_backward_weights_serial_##T##_x1, combine_backward_weights, T, Vectors<1>, 1) \
  INSTANCE(combine_backward_weights_plane_##T##_x4, combine_backward_weights, T, Vectors<4>, 32) \
  INSTANCE(combine_backward_weights_plane_##T##_x1, combine_backward_weights, T, Vectors<1>, 32)
WEIGHTS_INSTANCES(float)
WEIGHTS_INSTANCES(half)
WEIGHTS_INSTANCES(bfloat)
