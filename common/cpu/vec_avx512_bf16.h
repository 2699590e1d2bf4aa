// Rows and pairs of bfloat16 for AVX512-BF16, over the vectors of AVX-512. Include first, before the code that uses it.
#pragma once

#include "common/cpu/vec_avx512.h"

#pragma GCC target("avx512bf16")
#undef RUDNN_ISA
#define RUDNN_ISA avx512_bf16

namespace rudnn::avx512_bf16 {

using namespace avx512;

// The 32 elements of a row from `column` on, 0 from `columns` on.
inline __m512i load_row(const bfloat16* row, int64_t column, int64_t columns) {
  const int64_t count = columns - column;
  if (count >= 32) return _mm512_loadu_si512(row + column);
  return _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (__mmask32{1} << count) - 1, row + column);
}

[[gnu::always_inline]] inline void transpose(__m512i (&rows)[16]) {
  Vec vectors[16];
  for (int i = 0; i < 16; ++i) vectors[i].value = _mm512_castsi512_ps(rows[i]);
  transpose(vectors);
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(vectors[i].value);
}

// Pairs of bfloat16: the elements of `even` below those of `odd`.
inline __m512i pair_up(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Rounds to nearest even; denormals become 0, as the products take them.
inline __m256i narrow(Vec a) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.value)); }

// Sixteen rows of 64 bytes, one after the other.
inline void store_tile(const __m512i (&rows)[16], bfloat16* tile) {
  for (int row = 0; row < 16; ++row) _mm512_store_si512(tile + 32 * row, rows[row]);
}

}  // namespace rudnn::avx512_bf16
