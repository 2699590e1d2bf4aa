// y = x / sqrt(mean(x^2) + epsilon) * gamma over rows, in float32 arithmetic with one rounding.
#pragma once

#include "common/cuda/device.cuh"
#include "simt/tests/kernels/example_rms_norm_args.h"

namespace rudnn {

constexpr int kRmsNormThreads = 128;

// Combines one value of each of the kThreads threads of a row; all of them call and receive the result. A row of more
// than a warp is a whole block and costs two barriers and 4 bytes of shared memory a warp.
template <int kThreads, class Op>
__device__ __forceinline__ float row_reduce(float value, Op op) {
  value = warp_reduce(value, op);
  if constexpr (kThreads > kWarpSize) {
    __shared__ float partial[kThreads / kWarpSize];
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = partial[0];
#pragma unroll
    for (int i = 1; i < kThreads / kWarpSize; ++i) value = op(value, partial[i]);
    __syncthreads();  // the next call writes `partial` again
  }
  return value;
}

// Calls visit(i, elements i ... i + N - 1 of the row) for the share of one thread.
template <int N, int kThreads, class T, class F>
__device__ __forceinline__ void for_each_vector(const T* row, int64_t width, F visit) {
  for (int64_t i = int64_t{N} * (threadIdx.x % kThreads); i < width; i += N * kThreads) {
    float values[N];
    load_floats(values, row + i);
    visit(i, values);
  }
}

template <int N, int kThreads, class T>
__device__ __forceinline__ float sum_of_squares(const T* row, int64_t width, float scale) {
  float sum = 0;
  for_each_vector<N, kThreads>(row, width, [&](int64_t, const float (&values)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum += (values[j] * scale) * (values[j] * scale);
  });
  return row_reduce<kThreads>(sum, [](float a, float b) { return a + b; });
}

template <int N, int kThreads, class T>
__device__ __forceinline__ float inverse_rms(const T* row, const RmsNormArgs& args) {
  const float width = static_cast<float>(args.width);
  const float sum = sum_of_squares<N, kThreads>(row, args.width, 1.0f);
  if (isfinite(sum)) return rsqrtf(sum / width + args.epsilon);
  // The squares overflowed: the whole row, and so the whole warp or block, takes this way with the largest value as
  // unit.
  float largest = 0;
  for_each_vector<N, kThreads>(row, args.width, [&](int64_t, const float (&values)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) largest = fmaxf(largest, fabsf(values[j]));
  });
  const float scale = 1.0f / row_reduce<kThreads>(largest, [](float a, float b) { return fmaxf(a, b); });
  const float scaled = sum_of_squares<N, kThreads>(row, args.width, scale);
  return rsqrtf(scaled / width + args.epsilon * scale * scale) * scale;
}

// kThreads threads a row: a warp for narrow rows, the block for wide ones. N divides the width.
template <class T, class Gamma, int N, int kThreads>
__global__ void __launch_bounds__(kRmsNormThreads)
    rms_norm(const T* __restrict__ x, const Gamma* __restrict__ gamma, T* __restrict__ y, RmsNormArgs args) {
  constexpr int kRows = kRmsNormThreads / kThreads;
  const float offset = args.zero_centered ? 1.0f : 0.0f;
  for (int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads; row < args.rows;
       row += int64_t{gridDim.x} * kRows) {
    const T* in = x + row * args.width;
    T* out = y + row * args.width;
    const float inverse = inverse_rms<N, kThreads>(in, args);
    for_each_vector<N, kThreads>(in, args.width, [&](int64_t i, const float (&values)[N]) {
      float weight[N];
      load_floats(weight, gamma + i);
      Vec<T, N> result;
#pragma unroll
      for (int j = 0; j < N; ++j) result[j] = from_float<T>(values[j] * inverse * (weight[j] + offset));
      store_vec(out + i, result);
    });
  }
}

}  // namespace rudnn
