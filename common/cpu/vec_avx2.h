// float32 vectors of 8 lanes for AVX2, FMA and F16C. Include first, before the code that uses it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"

#pragma GCC target("avx2,fma,f16c")
#define RUDNN_ISA avx2

namespace rudnn::avx2 {

inline constexpr int kWidth = 8;

struct Vec {
  __m256 value;
};

struct Wide {
  __m256d low, high;
};

struct Full {};
struct Partial {
  int count;
};

inline __m256i mask_of(Partial lanes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes.count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.value, b.value)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.value, b.value)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.value, b.value)}; }
inline Vec operator-(Vec a) { return {_mm256_xor_ps(a.value, _mm256_set1_ps(-0.0f))}; }
inline Vec divide(Vec a, Vec b) { return {_mm256_div_ps(a.value, b.value)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.value, b.value)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.value)}; }
inline Vec broadcast(float value) { return {_mm256_set1_ps(value)}; }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.value, x.value, _mm256_cmp_ps(a.value, b.value, _CMP_LT_OQ))};
}

inline void pin(Vec& a) { __asm__("" : "+x"(a.value)); }

inline float reduce_add(Vec a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float reduce_max(Vec a) {
  __m128 largest = _mm_max_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
  largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
  return _mm_cvtss_f32(_mm_max_ss(largest, _mm_movehdup_ps(largest)));
}

inline void transpose(Vec (&vectors)[8]) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(vectors[i].value, vectors[i + 1].value);
    pairs[i + 1] = _mm256_unpackhi_ps(vectors[i].value, vectors[i + 1].value);
  }
  __m256 fours[8];
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    vectors[i].value = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    vectors[i + 4].value = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

inline Wide wide_zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }

inline Wide add(Wide a, Vec b) {
  return {_mm256_add_pd(a.low, _mm256_cvtps_pd(_mm256_castps256_ps128(b.value))),
          _mm256_add_pd(a.high, _mm256_cvtps_pd(_mm256_extractf128_ps(b.value, 1)))};
}

inline double reduce_add(Wide a) {
  const __m256d sum = _mm256_add_pd(a.low, a.high);
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

inline Vec round_to_integer(Vec a) { return {_mm256_round_ps(a.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// In two factors, each a normal number for |n| <= 252, so that only the second product can round.
inline Vec times_power_of_two(Vec a, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n.value);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.value, first), second)};
}

inline Vec widen_bfloat16(__m128i bits) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}

inline __m128i narrow_bfloat16(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256 nan = _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}

inline __m128i narrow_float16(Vec a) { return _mm256_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// The 16-bit elements of a partial vector go through a buffer: AVX2 has no 16-bit masks.
template <class T>
inline __m128i load_bits(const T* pointer, Partial lanes) {
  alignas(16) uint16_t bits[8] = {};
  for (int lane = 0; lane < lanes.count; ++lane) bits[lane] = pointer[lane].bits;
  return _mm_load_si128(reinterpret_cast<const __m128i*>(bits));
}

template <class T>
inline void store_bits(T* pointer, __m128i value, Partial lanes) {
  alignas(16) uint16_t bits[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(bits), value);
  for (int lane = 0; lane < lanes.count; ++lane) pointer[lane].bits = bits[lane];
}

inline Vec load(const float* pointer, Full) { return {_mm256_loadu_ps(pointer)}; }
inline Vec load(const float* pointer, Partial lanes) { return {_mm256_maskload_ps(pointer, mask_of(lanes))}; }
inline Vec load(const bfloat16* pointer, Full) {
  return widen_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pointer)));
}
inline Vec load(const bfloat16* pointer, Partial lanes) { return widen_bfloat16(load_bits(pointer, lanes)); }
inline Vec load(const float16* pointer, Full) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pointer)))};
}
inline Vec load(const float16* pointer, Partial lanes) { return {_mm256_cvtph_ps(load_bits(pointer, lanes))}; }

inline void store(float* pointer, Vec a, Full) { _mm256_storeu_ps(pointer, a.value); }
inline void store(float* pointer, Vec a, Partial lanes) { _mm256_maskstore_ps(pointer, mask_of(lanes), a.value); }
inline void store(bfloat16* pointer, Vec a, Full) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(pointer), narrow_bfloat16(a));
}
inline void store(bfloat16* pointer, Vec a, Partial lanes) { store_bits(pointer, narrow_bfloat16(a), lanes); }
inline void store(float16* pointer, Vec a, Full) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(pointer), narrow_float16(a));
}
inline void store(float16* pointer, Vec a, Partial lanes) { store_bits(pointer, narrow_float16(a), lanes); }

inline Vec keep(Vec a, Full, Vec) { return a; }
inline Vec keep(Vec a, Partial lanes, Vec fill) {
  return {_mm256_blendv_ps(fill.value, a.value, _mm256_castsi256_ps(mask_of(lanes)))};
}

#include "common/cpu/vec.h"

}  // namespace rudnn::avx2
