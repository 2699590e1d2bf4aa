// layer_norm and fused_add_layer_norm: y = (x - mean(x)) / sqrt(variance(x) + epsilon) * gamma + beta.
#include "metal/norm_args.h"
#include "metal/parameter_sums.h"
#include "metal/row.h"
#include "ops/norm_statistics.h"

using namespace metal;
using namespace rudnn;

constant bool kGammaIsFloat [[function_constant(kGammaIsFloatConstant)]];
constant bool kHasBeta [[function_constant(kHasBetaConstant)]];
constant bool kBetaIsFloat [[function_constant(kBetaIsFloatConstant)]];
constant bool kAddsResidual [[function_constant(kAddsResidualConstant)]];  // x = input + residual, rounded to T
constant bool kAddsGradSum [[function_constant(kAddsGradSumConstant)]];
constant bool kWantsInput [[function_constant(kWantsInputConstant)]];
constant bool kWantsGamma [[function_constant(kWantsGammaConstant)]];
constant bool kWantsBeta [[function_constant(kWantsBetaConstant)]];

template <typename T, typename Shape>
inline float mean_of(thread const Row<T, Shape>& row, Team team, long width, float factor) {
  typename Shape::Floats sum = typename Shape::Floats(0.0f);
  FOR_EACH_VECTOR(at, Shape, team, width) sum += row.get(at) * factor;
  return row_sum<Shape>(total(sum), team) / float(width);
}

template <typename T, typename Shape>
struct LayerMeasure {
  using Floats = typename Shape::Floats;

  thread const Row<T, Shape>& x;
  Team team;
  long width;

  LayerStatistics operator()(float factor, float) const {
    const float centre = mean_of(x, team, width, factor);
    Floats deviations = Floats(0.0f);
    Floats squares = Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats deviation = x.get(at) * factor - centre;
      deviations += deviation;
      squares += deviation * deviation;
    }
    const float2 sums = row_sum<Shape>(float2(total(deviations), total(squares)), team);
    return statistics_from(factor, centre, {sums.x, sums.y, 0.0f, 0.0f}, 1.0f, float(width));
  }
};

template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void layer_norm(
    constant NormArgs& args [[buffer(kArgsBuffer)]], device const void* gamma [[buffer(kGammaBuffer)]],
    device const void* beta [[buffer(kBetaBuffer), function_constant(kHasBeta)]],
    device const T* input [[buffer(kInputBuffer)]],
    device const T* residual [[buffer(kResidualBuffer), function_constant(kAddsResidual)]],
    device T* output [[buffer(kOutputBuffer)]], device T* sum [[buffer(kSumBuffer), function_constant(kAddsResidual)]],
    uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Floats = typename Shape::Floats;
  threadgroup float4 partial[kMostSimdgroups];
  const Team team = team_of<Shape>(group, groups, index, threads, lane, simdgroup, partial);
  const long width = args.width;
  for (long row = team.row; row < args.rows; row += team.row_step) {
    const long start = row * width;
    Row<T, Shape> x;
    if (kAddsResidual)
      x.load_sum(input + start, residual + start, sum + start, team, width);
    else
      x.load(input + start, team, width);

    RowRoots roots;
    const LayerMeasure<T, Shape> measure = {x, team, width};
    const LayerStatistics statistics = measure_in_range(x, team, args, roots, measure);

    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats weight = load_parameter<Shape, T>(gamma, kGammaIsFloat, at.offset);
      Floats shift = Floats(0.0f);
      if (kHasBeta) shift = load_parameter<Shape, T>(beta, kBetaIsFloat, at.offset);
      const Floats values = statistics.deviation(x.get(at)) * roots.normalise;
      store_floats<Shape>(output + start + at.offset, fma(values, weight, shift));
    }
  }
}

template <typename T, typename Shape>
struct LayerBackwardMeasure {
  using Floats = typename Shape::Floats;

  thread const Row<T, Shape>& x;
  thread const Row<T, Shape>& grad;
  device const void* gamma;
  Team team;
  long width;

  LayerStatistics operator()(float factor, float share) const {
    const float centre = mean_of(x, team, width, factor);
    Floats deviations = Floats(0.0f);
    Floats squares = Floats(0.0f);
    Floats upstreams = Floats(0.0f);
    Floats products = Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats deviation = x.get(at) * factor - centre;
      const Floats upstream = grad.get(at) * load_parameter<Shape, T>(gamma, kGammaIsFloat, at.offset) * share;
      deviations += deviation;
      squares += deviation * deviation;
      upstreams += upstream;
      products += upstream * deviation;
    }
    const float4 sums = row_sum<Shape>(
        float4(float2(total(deviations), total(squares)), float2(total(upstreams), total(products))), team);
    return statistics_from(factor, centre, {sums.x, sums.y, sums.z, sums.w}, share, float(width));
  }
};

// With n the normalised row and d = grad * gamma, the gradient of x is
// (d - mean(d) - n * mean(d * n)) / sqrt(variance(x) + epsilon).
template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void layer_norm_backward(
    constant NormArgs& args [[buffer(kArgsBuffer)]], device const void* gamma [[buffer(kGammaBuffer)]],
    device const T* grads [[buffer(kGradBuffer)]],
    device const T* grad_sum [[buffer(kGradSumBuffer), function_constant(kAddsGradSum)]],
    device const T* input [[buffer(kInputBuffer)]],
    device T* grad_input [[buffer(kGradInputBuffer), function_constant(kWantsInput)]],
    device float* gamma_partials [[buffer(kGammaPartialsBuffer), function_constant(kWantsGamma)]],
    device float* beta_partials [[buffer(kBetaPartialsBuffer), function_constant(kWantsBeta)]],
    uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Floats = typename Shape::Floats;
  threadgroup float4 partial[kMostSimdgroups];
  const Team team = team_of<Shape>(group, groups, index, threads, lane, simdgroup, partial);
  const long width = args.width;
  ParameterSum<Shape> gamma_sum;
  ParameterSum<Shape> beta_sum;
  if (kWantsGamma) gamma_sum.clear(gamma_partials, team, width);
  if (kWantsBeta) beta_sum.clear(beta_partials, team, width);
  for (long row = team.row; row < args.rows; row += team.row_step) {
    const long start = row * width;
    Row<T, Shape> x;
    Row<T, Shape> grad;
    x.load(input + start, team, width);
    grad.load(grads + start, team, width);

    RowRoots roots;
    const LayerBackwardMeasure<T, Shape> measure = {x, grad, gamma, team, width};
    const LayerStatistics statistics = measure_in_range(x, team, args, roots, measure);
    const Floats projection = Floats(projection_of(statistics.product, roots.normalise));

    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats values = statistics.deviation(x.get(at)) * roots.normalise;
      const Floats upstream = grad.get(at);
      if (kWantsGamma) gamma_sum.add(upstream * values, at);
      if (kWantsBeta) beta_sum.add(upstream, at);
      if (kWantsInput) {
        // Rounded as in the mean, so that a row of one element has a gradient of exactly 0.
        const Floats product = upstream * load_parameter<Shape, T>(gamma, kGammaIsFloat, at.offset);
        const Floats centred = fma(-values, projection, product - statistics.upstream);
        Floats result = centred * roots.gradient[0] * roots.gradient[1];
        if (kAddsGradSum) result += load_floats<Shape>(grad_sum + start + at.offset);
        store_floats<Shape>(grad_input + start + at.offset, result);
      }
    }
  }
  if (kWantsGamma) gamma_sum.store(team, width);
  if (kWantsBeta) beta_sum.store(team, width);
}

INSTANCES(layer_norm, float, kForwardVectors, kForwardElements)
INSTANCES(layer_norm, half, kForwardVectors, kForwardElements)
INSTANCES(layer_norm, bfloat, kForwardVectors, kForwardElements)
INSTANCES(layer_norm_backward, float, kBackwardVectors, kBackwardElements)
INSTANCES(layer_norm_backward, half, kBackwardVectors, kBackwardElements)
INSTANCES(layer_norm_backward, bfloat, kBackwardVectors, kBackwardElements)
