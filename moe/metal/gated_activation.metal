// gated_activation: activation(a) * b for the halves a, b of each row.
#include "metal/elements.h"
#include "metal/gated_activation_args.h"
#include "ops/activation_math.h"

using namespace metal;
using namespace rudnn;

constant int kActivation [[function_constant(kActivationConstant)]];

inline float gated(float a, float b) { return activate(Activation(kActivation), a) * b; }
inline float4 gated(float4 a, float4 b) {
  return float4(gated(a.x, b.x), gated(a.y, b.y), gated(a.z, b.z), gated(a.w, b.w));
}

inline Activated activated(float a) { return activate_with_slope(Activation(kActivation), a); }

// What a gradient of the output is multiplied by for that of a.
inline float slope_of_first(float a, float b) { return activated(a).slope * b; }
inline float4 slope_of_first(float4 a, float4 b) {
  return float4(activated(a.x).slope, activated(a.y).slope, activated(a.z).slope, activated(a.w).slope) * b;
}

template <typename T, typename Shape>
[[kernel]] void gated_activation(constant GatedActivationArgs& args [[buffer(kArgsBuffer)]],
                                 device const T* input [[buffer(kInputBuffer)]],
                                 device T* output [[buffer(kOutputBuffer)]], uint2 position [[thread_position_in_grid]],
                                 uint2 size [[threads_per_grid]]) {
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long row = position.y; row < args.rows; row += size.y) {
    device const T* first = input + row * 2 * args.width + column;
    const typename Shape::Floats a = load_floats<Shape>(first);
    const typename Shape::Floats b = load_floats<Shape>(first + args.width);
    store_floats<Shape>(output + row * args.width + column, gated(a, b));
  }
}

template <typename T, typename Shape>
[[kernel]] void gated_activation_backward(constant GatedActivationArgs& args [[buffer(kArgsBuffer)]],
                                          device const T* grads [[buffer(kGradBuffer)]],
                                          device const T* input [[buffer(kInputBuffer)]],
                                          device T* grad_input [[buffer(kGradInputBuffer)]],
                                          uint2 position [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  using Floats = typename Shape::Floats;
  const long column = long(position.x) * Shape::kVector;
  if (column >= args.width) return;
  for (long row = position.y; row < args.rows; row += size.y) {
    const long first = row * 2 * args.width + column;
    const Floats a = load_floats<Shape>(input + first);
    const Floats b = load_floats<Shape>(input + first + args.width);
    const Floats grad = load_floats<Shape>(grads + row * args.width + column);
    store_floats<Shape>(grad_input + first, grad * slope_of_first(a, b));
    store_floats<Shape>(grad_input + first + args.width, gated(a, grad));
  }
}

MATRIX_INSTANCES(gated_activation, float)
MATRIX_INSTANCES(gated_activation, half)
MATRIX_INSTANCES(gated_activation, bfloat)
MATRIX_INSTANCES(gated_activation_backward, float)
MATRIX_INSTANCES(gated_activation_backward, half)
MATRIX_INSTANCES(gated_activation_backward, bfloat)
