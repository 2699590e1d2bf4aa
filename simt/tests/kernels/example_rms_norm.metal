// y = x / sqrt(mean(x^2) + epsilon) * gamma over rows, in float32 arithmetic with one rounding.
#include <metal_simdgroup>
#include <metal_stdlib>

#include "simt/tests/kernels/example_rms_norm_args.h"

#pragma METAL fp math_mode(safe)  // the overflow of a sum must be seen

using namespace metal;

constant constexpr uint kMaxSimdgroups = 32;

// The sum over a threadgroup in every thread. `partial` holds a value for each simdgroup.
inline float threadgroup_sum(float value, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
  value = simd_sum(value);
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next call writes `partial` again
  return value;
}

// One threadgroup a row.
template <typename T, typename G>
[[kernel]] void rms_norm(device const T* x [[buffer(0)]], device const G* gamma [[buffer(1)]],
                         device T* y [[buffer(2)]], constant RmsNormArgs& args [[buffer(3)]],
                         uint row [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]],
                         uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[kMaxSimdgroups];
  device const T* in = x + ulong(row) * ulong(args.width);
  device T* out = y + ulong(row) * ulong(args.width);

  float sum = 0.0f;
  float largest = 0.0f;
  for (long i = index; i < args.width; i += threads) {
    const float value = float(in[i]);
    sum += value * value;
    largest = max(largest, fabs(value));
  }
  sum = threadgroup_sum(sum, partial, lane, simdgroup, simdgroups);

  float scale = 1.0f;
  if (!isfinite(sum)) {  // the squares overflowed, for the whole row: sum again with the largest value as unit
    largest = simd_max(largest);
    if (lane == 0) partial[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    scale = 1.0f / simd_max(lane < simdgroups ? partial[lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (long i = index; i < args.width; i += threads) sum += (float(in[i]) * scale) * (float(in[i]) * scale);
    sum = threadgroup_sum(sum, partial, lane, simdgroup, simdgroups);
  }

  const float inverse = precise::rsqrt(sum / float(args.width) + args.epsilon * scale * scale) * scale;
  const float offset = args.zero_centered != 0 ? 1.0f : 0.0f;
  for (long i = index; i < args.width; i += threads) out[i] = T(float(in[i]) * inverse * (float(gamma[i]) + offset));
}

#define RMS_NORM(name, T, G) template [[host_name(name)]] [[kernel]] decltype(rms_norm<T, G>) rms_norm<T, G>;
RMS_NORM("rms_norm_float32", float, float)
RMS_NORM("rms_norm_float16", half, half)
RMS_NORM("rms_norm_bfloat16", bfloat, bfloat)
RMS_NORM("rms_norm_float16_gamma_float32", half, float)
RMS_NORM("rms_norm_bfloat16_gamma_float32", bfloat, float)
