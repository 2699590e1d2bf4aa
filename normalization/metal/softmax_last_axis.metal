// softmax_last_axis: y = exp(x - max(x)) / sum(exp(x - max(x))).
#include "metal/row.h"
#include "metal/softmax_last_axis_args.h"

using namespace metal;
using namespace rudnn;

template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void softmax_last_axis(
    constant SoftmaxArgs& args [[buffer(kArgsBuffer)]], device const T* input [[buffer(kInputBuffer)]],
    device T* output [[buffer(kOutputBuffer)]], uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Floats = typename Shape::Floats;
  threadgroup float4 partial[kMostSimdgroups];
  const Team team = team_of<Shape>(group, groups, index, threads, lane, simdgroup, partial);
  const long width = args.width;
  for (long row = team.row; row < args.rows; row += team.row_step) {
    const long start = row * width;
    Row<T, Shape> x;
    x.load(input + start, team, width);

    // NaN is left out of the maximum, and comes back in the exponential and so in the sum.
    Floats greatest = Floats(-INFINITY);
    FOR_EACH_VECTOR(at, Shape, team, width) greatest = precise::fmax(greatest, x.get(at));
    const float maximum = row_max<Shape>(largest(greatest), team);

    Floats sums = Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) sums += precise::exp(x.get(at) - maximum);
    const float reciprocal = 1.0f / row_sum<Shape>(total(sums), team);

    FOR_EACH_VECTOR(at, Shape, team, width) {
      store_floats<Shape>(output + start + at.offset, precise::exp(x.get(at) - maximum) * reciprocal);
    }
  }
}

// The gradient of x is y * (grad - sum(grad * y)).
template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void softmax_last_axis_backward(
    constant SoftmaxArgs& args [[buffer(kArgsBuffer)]], device const T* grads [[buffer(kGradBuffer)]],
    device const T* output [[buffer(kOutputBuffer)]], device T* grad_input [[buffer(kGradInputBuffer)]],
    uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Floats = typename Shape::Floats;
  threadgroup float4 partial[kMostSimdgroups];
  const Team team = team_of<Shape>(group, groups, index, threads, lane, simdgroup, partial);
  const long width = args.width;
  for (long row = team.row; row < args.rows; row += team.row_step) {
    const long start = row * width;
    Row<T, Shape> y;
    Row<T, Shape> grad;
    y.load(output + start, team, width);
    grad.load(grads + start, team, width);

    Floats products = Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) products += grad.get(at) * y.get(at);
    const float product = row_sum<Shape>(total(products), team);

    FOR_EACH_VECTOR(at, Shape, team, width) {
      store_floats<Shape>(grad_input + start + at.offset, y.get(at) * (grad.get(at) - product));
    }
  }
}

INSTANCES(softmax_last_axis, float, kForwardVectors, kForwardElements)
INSTANCES(softmax_last_axis, half, kForwardVectors, kForwardElements)
INSTANCES(softmax_last_axis, bfloat, kForwardVectors, kForwardElements)
INSTANCES(softmax_last_axis_backward, float, kBackwardVectors, kBackwardElements)
INSTANCES(softmax_last_axis_backward, half, kBackwardVectors, kBackwardElements)
INSTANCES(softmax_last_axis_backward, bfloat, kBackwardVectors, kBackwardElements)
