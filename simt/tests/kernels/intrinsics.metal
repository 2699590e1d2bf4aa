// Kernels for known-answer tests of the Metal shim.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

constant int kShift [[function_constant(1)]];

// Each lane's two elements of a matrix, to show which they are.
kernel void matrix_layout(device float2* y [[buffer(0)]], device const float* x [[buffer(1)]],
                          uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 8);
  y[lane] = m.thread_elements();
}

// y = a b + a^T of 8x8 matrices in T, sums in float; `b` follows `a`, in a matrix of 24 columns.
template <typename T>
kernel void matrix_product(device float* y [[buffer(0)]], device const T* x [[buffer(1)]]) {
  simdgroup_matrix<T, 8, 8> a, b, transposed;
  simdgroup_load(a, x, 24);
  simdgroup_load(b, x, 24, ulong2(8, 0));
  simdgroup_load(transposed, x, 24, ulong2(0, 0), true);
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(sum, a, b, sum);
  simdgroup_multiply_accumulate(sum, transposed, simdgroup_matrix<T, 8, 8>(T(1.0f)), sum);
  simdgroup_store(sum, y, 8);
}
#define MATRIX_PRODUCT(name, T) template [[host_name(name)]] kernel decltype(matrix_product<T>) matrix_product<T>;
MATRIX_PRODUCT("matrix_product_half", half)
MATRIX_PRODUCT("matrix_product_bfloat", bfloat)

kernel void simd_functions(device int* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  const int value = int(lane) + 1;
  y[lane] = simd_sum(value);
  y[32 + lane] = simd_max(value) * 100 + simd_min(value);
  y[64 + lane] = simd_prefix_inclusive_sum(value);
  y[96 + lane] = simd_prefix_exclusive_sum(value);
  y[128 + lane] = simd_shuffle(value, ushort(7));
  y[160 + lane] = simd_shuffle_xor(value, ushort(5));
  y[192 + lane] = simd_broadcast(value, ushort(31));
  y[224 + lane] = (simd_all(lane < 32) ? 1 : 0) + (simd_any(lane == 40) ? 2 : 0) + (simd_any(lane == 9) ? 4 : 0);
  y[256 + lane] = lane < 30 ? simd_shuffle_down(value, ushort(2)) : (simd_shuffle_down(value, ushort(2)), 0);
}

kernel void half_extremes(device half* y [[buffer(0)]], device const half* x [[buffer(1)]],
                          uint lane [[thread_index_in_simdgroup]]) {
  y[lane] = simd_max(x[lane]);
  y[32 + lane] = simd_min(x[lane]);
}

constant bool kHasSecond [[function_constant(0)]];

// With a limit of threads and a buffer that may be missing. x and z may be NaN.
[[kernel, max_total_threads_per_threadgroup(64)]] void float_extremes(device float4* y [[buffer(0)]],
                                                                      device const float4* x [[buffer(1)]],
                                                                      device const float4* z
                                                                      [[buffer(2), function_constant(kHasSecond)]],
                                                                      uint lane [[thread_index_in_simdgroup]]) {
  float4 other = float4(0.0f);
  if (kHasSecond) other = z[lane];
  y[lane] = fmax(x[lane], other);
  y[32 + lane] = fmin(x[lane], other);
  y[64 + lane] = fma(x[lane], other, float4(1.0f));
}

kernel void positions(device int* y [[buffer(0)]], uint3 group [[threadgroup_position_in_grid]],
                      uint2 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                      uint size [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint3 grid [[threads_per_grid]], ushort i [[thread_position_in_grid]]) {
  y[i] = int(group.x * 1000 + index * 10 + simdgroup) + int(grid.x - groups.x * size) + kShift;
}

kernel void vectors(device float4* y [[buffer(0)]], device const half4* x [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  float4 v = float4(x[i]);
  v.xy = float2(v.y, v.x);
  v = 2.0f * v - float4(v.zw, float2(1.0f, 0.5f));
  y[i] = v / float4(0.5f) + max(v, float4(0.0f));
}

kernel void counters(device atomic_int* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&y[0], 1, memory_order_relaxed);
  atomic_fetch_max_explicit(&y[1], int(i), memory_order_relaxed);
}

// Products of float and of half. Of float, subnormal operands and results count as zero.
kernel void products(device float* y [[buffer(0)]], device const float2* x [[buffer(1)]], device half* z [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {
  y[i] = x[i].x * x[i].y;
  z[i] = half(x[i].x) * half(x[i].y);
}
