// Names that the shim defines (vector.h, math.h, simdgroup.h) and the lint declares (lint/metal_stdlib).
#pragma once

// clang-format off
#define SIMT_VECTOR_TYPES(X) \
  X(float) X(half) X(bfloat) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)

#define SIMT_MATH_FUNCTIONS(X) \
  X(exp, ::expf) X(exp2, ::exp2f) X(log, ::logf) X(log2, ::log2f) X(sqrt, ::sqrtf) X(rsqrt, inverse_sqrt) \
  X(tanh, ::tanhf) X(sin, ::sinf) X(cos, ::cosf) X(fabs, ::fabsf) X(abs, ::fabsf) X(floor, ::floorf) X(rint, ::rintf)

// Over the lanes of a simdgroup: the lanes that a result takes in (simdgroup.h: Scan), and how two values combine.
#define SIMT_REDUCTIONS(X) \
  X(simd_sum, kAll, a + b) X(simd_product, kAll, a * b) X(simd_and, kAll, a & b) X(simd_or, kAll, a | b) \
  X(simd_max, kAll, metal::max(a, b)) X(simd_min, kAll, metal::min(a, b)) \
  X(simd_prefix_inclusive_sum, kInclusive, a + b) X(simd_prefix_exclusive_sum, kExclusive, a + b)

// The lane that a shuffle reads.
#define SIMT_SHUFFLES(X) \
  X(simd_shuffle, operand) X(simd_broadcast, operand) X(simd_shuffle_xor, lane ^ operand) \
  X(simd_shuffle_down, lane + operand) X(simd_shuffle_up, lane - operand)
// clang-format on
