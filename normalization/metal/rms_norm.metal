// rms_norm, rms_norm_gated and fused_add_rms_norm: y = x / sqrt(mean(x^2) + epsilon) * (gamma + gamma_offset)
// [* activation(gate)].
#include "metal/norm_args.h"
#include "metal/parameter_sums.h"
#include "metal/row.h"
#include "ops/norm_statistics.h"

using namespace metal;
using namespace rudnn;

constant bool kGammaIsFloat [[function_constant(kGammaIsFloatConstant)]];
constant bool kZeroCentered [[function_constant(kZeroCenteredConstant)]];
constant bool kGated [[function_constant(kGatedConstant)]];
constant bool kSigmoid [[function_constant(kSigmoidConstant)]];            // else silu
constant bool kAddsResidual [[function_constant(kAddsResidualConstant)]];  // x = input + residual, rounded to T
constant bool kAddsGradSum [[function_constant(kAddsGradSumConstant)]];
constant bool kWantsInput [[function_constant(kWantsInputConstant)]];
constant bool kWantsGate [[function_constant(kWantsGateConstant)]];
constant bool kWantsGamma [[function_constant(kWantsGammaConstant)]];

template <typename Floats>
struct Activation {
  Floats value;
  Floats slope;
};
template <typename Floats>
inline Activation<Floats> activate(Floats z) {
  const Floats probability = 1.0f / (1.0f + precise::exp(-z));
  const Floats complement = 1.0f - probability;
  if (kSigmoid) return {probability, probability * complement};
  const Floats silu = z * probability;
  return {silu, fma(silu, complement, probability)};
}

// gamma, or one more if it is zero-centred.
template <typename Shape, typename T>
inline typename Shape::Floats load_weight(device const void* gamma, long offset) {
  return load_parameter<Shape, T>(gamma, kGammaIsFloat, offset) + (kZeroCentered ? 1.0f : 0.0f);
}

template <typename T, typename Shape>
struct RmsMeasure {
  thread const Row<T, Shape>& x;
  Team team;
  long width;

  RmsStatistics operator()(float factor, float) const {
    typename Shape::Floats squares = typename Shape::Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) {
      const typename Shape::Floats scaled = x.get(at) * factor;
      squares += scaled * scaled;
    }
    return {factor, row_sum<Shape>(total(squares), team) / float(width), 0.0f};
  }
};

template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void rms_norm(
    constant NormArgs& args [[buffer(kArgsBuffer)]], device const void* gamma [[buffer(kGammaBuffer)]],
    device const T* input [[buffer(kInputBuffer)]],
    device const T* residual [[buffer(kResidualBuffer), function_constant(kAddsResidual)]],
    device const T* gate [[buffer(kGateBuffer), function_constant(kGated)]], device T* output [[buffer(kOutputBuffer)]],
    device T* sum [[buffer(kSumBuffer), function_constant(kAddsResidual)]], uint group [[threadgroup_position_in_grid]],
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
    if (kAddsResidual)
      x.load_sum(input + start, residual + start, sum + start, team, width);
    else
      x.load(input + start, team, width);

    RowRoots roots;
    const RmsMeasure<T, Shape> measure = {x, team, width};
    const RmsStatistics statistics = measure_in_range(x, team, args, roots, measure);

    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats weight = load_weight<Shape, T>(gamma, at.offset);
      Floats values = x.get(at) * statistics.factor * roots.normalise * weight;
      if (kGated) values *= activate(load_floats<Shape>(gate + start + at.offset)).value;
      store_floats<Shape>(output + start + at.offset, values);
    }
  }
}

template <typename T, typename Shape>
struct RmsBackwardMeasure {
  using Floats = typename Shape::Floats;

  thread const Row<T, Shape>& x;
  thread const Row<T, Shape>& grad;
  device const void* gamma;
  device const T* gate;  // of the row
  Team team;
  long width;

  RmsStatistics operator()(float factor, float share) const {
    Floats squares = Floats(0.0f);
    Floats products = Floats(0.0f);
    FOR_EACH_VECTOR(at, Shape, team, width) {
      Floats upstream = grad.get(at) * load_weight<Shape, T>(gamma, at.offset);
      if (kGated) upstream *= activate(load_floats<Shape>(gate + at.offset)).value;
      const Floats scaled = x.get(at) * factor;
      squares += scaled * scaled;
      products += upstream * share * scaled;
    }
    const float2 sums = row_sum<Shape>(float2(total(squares), total(products)), team);
    return {factor, sums.x / float(width), sums.y / (float(width) * share)};
  }
};

// With n = x / sqrt(mean(x^2) + epsilon) and d = grad * weight [* activation(gate)], the gradient of x is
// (d - n * mean(d * n)) / sqrt(mean(x^2) + epsilon).
template <typename T, typename Shape>
[[kernel, max_total_threads_per_threadgroup(kMostThreads)]] void rms_norm_backward(
    constant NormArgs& args [[buffer(kArgsBuffer)]], device const void* gamma [[buffer(kGammaBuffer)]],
    device const T* grads [[buffer(kGradBuffer)]],
    device const T* grad_sum [[buffer(kGradSumBuffer), function_constant(kAddsGradSum)]],
    device const T* input [[buffer(kInputBuffer)]],
    device const T* gate [[buffer(kGateBuffer), function_constant(kGated)]],
    device T* grad_input [[buffer(kGradInputBuffer), function_constant(kWantsInput)]],
    device T* grad_gate [[buffer(kGradGateBuffer), function_constant(kWantsGate)]],
    device float* gamma_partials [[buffer(kGammaPartialsBuffer), function_constant(kWantsGamma)]],
    uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Floats = typename Shape::Floats;
  threadgroup float4 partial[kMostSimdgroups];
  const Team team = team_of<Shape>(group, groups, index, threads, lane, simdgroup, partial);
  const long width = args.width;
  ParameterSum<Shape> gamma_sum;
  if (kWantsGamma) gamma_sum.clear(gamma_partials, team, width);
  for (long row = team.row; row < args.rows; row += team.row_step) {
    const long start = row * width;
    Row<T, Shape> x;
    Row<T, Shape> grad;
    x.load(input + start, team, width);
    grad.load(grads + start, team, width);
    device const T* gates = kGated ? gate + start : nullptr;

    RowRoots roots;
    const RmsBackwardMeasure<T, Shape> measure = {x, grad, gamma, gates, team, width};
    const RmsStatistics statistics = measure_in_range(x, team, args, roots, measure);
    const Floats projection = Floats(projection_of(statistics.product, roots.normalise));

    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats values = x.get(at) * statistics.factor * roots.normalise;
      const Floats weight = load_weight<Shape, T>(gamma, at.offset);
      Floats upstream = grad.get(at);
      if (kGated) {
        const Activation<Floats> activation = activate(load_floats<Shape>(gates + at.offset));
        if (kWantsGate)
          store_floats<Shape>(grad_gate + start + at.offset, upstream * values * weight * activation.slope);
        upstream *= activation.value;
      }
      if (kWantsGamma) gamma_sum.add(upstream * values, at);
      if (kWantsInput) {
        Floats result = fma(-values, projection, upstream * weight) * roots.gradient[0] * roots.gradient[1];
        if (kAddsGradSum) result += load_floats<Shape>(grad_sum + start + at.offset);
        store_floats<Shape>(grad_input + start + at.offset, result);
      }
    }
  }
  if (kWantsGamma) gamma_sum.store(team, width);
}

INSTANCES(rms_norm, float, kForwardVectors, kForwardElements)
INSTANCES(rms_norm, half, kForwardVectors, kForwardElements)
INSTANCES(rms_norm, bfloat, kForwardVectors, kForwardElements)
INSTANCES(rms_norm_backward, float, kBackwardVectors, kBackwardElements)
INSTANCES(rms_norm_backward, half, kBackwardVectors, kBackwardElements)
INSTANCES(rms_norm_backward, bfloat, kBackwardVectors, kBackwardElements)
