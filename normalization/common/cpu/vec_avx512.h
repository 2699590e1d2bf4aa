// float32 vectors of 16 lanes for AVX-512 (F, BW, DQ, VL). Include first, before the code that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"

// Up to version 12, GCC's own AVX-512 intrinsics set it off wherever they are used.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define RUDNN_ISA avx512

namespace rudnn::avx512 {

inline constexpr int kWidth = 16;

struct Vec {
  __m512 value;
};

struct Wide {
  __m512d low, high;
};

struct Full {};
struct Partial {
  int count;
};

inline __mmask16 mask_of(Partial lanes) { return static_cast<__mmask16>((1u << lanes.count) - 1); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.value, b.value)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.value, b.value)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.value, b.value)}; }
inline Vec operator-(Vec a) { return {_mm512_xor_ps(a.value, _mm512_set1_ps(-0.0f))}; }
inline Vec divide(Vec a, Vec b) { return {_mm512_div_ps(a.value, b.value)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.value, b.value)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.value)}; }
inline Vec broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_mov_ps(y.value, _mm512_cmp_ps_mask(a.value, b.value, _CMP_LT_OQ), x.value)};
}
inline void pin(Vec& a) { __asm__("" : "+v"(a.value)); }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.value); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.value); }

// sums[i] = the sum of the lanes of vectors[i]. Each step adds the halves of what is left of every vector, and puts two
// of the results side by side.
inline void reduce_add_each(const Vec (&vectors)[8], float* sums) {
  __m512 eighths[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = vectors[2 * i].value;
    const __m512 b = vectors[2 * i + 1].value;
    eighths[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  __m512 fourths[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = eighths[2 * i];
    const __m512 b = eighths[2 * i + 1];
    fourths[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 pairs =
      _mm512_add_ps(_mm512_shuffle_ps(fourths[0], fourths[1], 0x44), _mm512_shuffle_ps(fourths[0], fourths[1], 0xee));
  const __m512 ones = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  // Lane 4 i holds the sum of vector i, lane 4 i + 2 that of vector 4 + i.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, ones)));
}

// Inline, since a call would pass the vectors through memory.
[[gnu::always_inline]] inline void transpose(Vec (&vectors)[16]) {
  __m512i rows[16];
  __m512i pairs[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(vectors[i].value);
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = half; i < half + 4; ++i) {
      pairs[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
      pairs[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    vectors[i].value = _mm512_castsi512_ps(_mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0x88));
    vectors[i + 8].value = _mm512_castsi512_ps(_mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0xdd));
  }
}

inline Wide wide_zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline Wide add(Wide a, Vec b) {
  return {_mm512_add_pd(a.low, _mm512_cvtps_pd(_mm512_castps512_ps256(b.value))),
          _mm512_add_pd(a.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(b.value, 1)))};
}
inline double reduce_add(Wide a) { return _mm512_reduce_add_pd(_mm512_add_pd(a.low, a.high)); }
inline Vec round_to_integer(Vec a) {
  return {_mm512_roundscale_ps(a.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec times_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.value, n.value)}; }

inline Vec widen_bfloat16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// Not vcvtneps2bf16, which flushes denormals to zero.
inline __m256i narrow_bfloat16(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

inline __m256i narrow_float16(Vec a) { return _mm512_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const float* pointer, Full) { return {_mm512_loadu_ps(pointer)}; }
inline Vec load(const float* pointer, Partial lanes) { return {_mm512_maskz_loadu_ps(mask_of(lanes), pointer)}; }
inline Vec load(const bfloat16* pointer, Full) {
  return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pointer)));
}
inline Vec load(const bfloat16* pointer, Partial lanes) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(mask_of(lanes), pointer));
}
inline Vec load(const float16* pointer, Full) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pointer)))};
}
inline Vec load(const float16* pointer, Partial lanes) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_of(lanes), pointer))};
}

inline void store(float* pointer, Vec a, Full) { _mm512_storeu_ps(pointer, a.value); }
inline void store(float* pointer, Vec a, Partial lanes) { _mm512_mask_storeu_ps(pointer, mask_of(lanes), a.value); }
inline void store(bfloat16* pointer, Vec a, Full) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(pointer), narrow_bfloat16(a));
}
inline void store(bfloat16* pointer, Vec a, Partial lanes) {
  _mm256_mask_storeu_epi16(pointer, mask_of(lanes), narrow_bfloat16(a));
}
inline void store(float16* pointer, Vec a, Full) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(pointer), narrow_float16(a));
}
inline void store(float16* pointer, Vec a, Partial lanes) {
  _mm256_mask_storeu_epi16(pointer, mask_of(lanes), narrow_float16(a));
}

inline Vec keep(Vec a, Full, Vec) { return a; }
inline Vec keep(Vec a, Partial lanes, Vec fill) { return {_mm512_mask_mov_ps(fill.value, mask_of(lanes), a.value)}; }

#include "common/cpu/vec.h"

}  // namespace rudnn::avx512
