#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx512_bf16.h"
#include "cpu/attention.h"

namespace rudnn::avx512_bf16 {
namespace {

// Products by vectors of pairs, summed in registers.
struct Products {
  struct Session {};

  // Vectors leave no time for a function between products.
  static constexpr int64_t kPauses = 0;

  static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                       int64_t steps, bool add, float* result) {
    multiply_columns<2>(left, row_stride, step_stride, right, steps, add, result);
  }
  template <class Between>
  static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                       int64_t steps, bool add, float* result, Between&&) {
    multiply(left, row_stride, step_stride, right, steps, add, result);
  }
  static void multiply_narrow(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                              int64_t steps, float* result) {
    multiply_columns<1>(left, row_stride, step_stride, right, steps, false, result);
  }

 private:
  static constexpr int kRows = 8;  // in registers

  template <int kVectors>
  static void multiply_columns(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                               int64_t steps, bool add, float* result) {
    for (int64_t first = 0; first < 32; first += kRows) {
      __m512 sums[kRows][kVectors];
      float* rows = result + first * kVectors * kWidth;
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kVectors; ++i) {
        sums[i / kVectors][i % kVectors] = add ? _mm512_loadu_ps(rows + i * kWidth) : _mm512_setzero_ps();
      }
      for (int64_t step = 0; step < steps; ++step) {
        const bfloat16* pairs = left + first * row_stride + step * step_stride;
        const bfloat16* columns = right + step * kVectors * 512;
        for (int64_t pair = 0; pair < 16; ++pair) {
          __m512bh b[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            b[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(columns + v * 512 + pair * 32));
          }
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            int32_t bits;
            __builtin_memcpy(&bits, pairs + row * row_stride + 2 * pair, sizeof(bits));
            const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], a, b[v]);
          }
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kVectors; ++i) {
        _mm512_storeu_ps(rows + i * kWidth, sums[i / kVectors][i % kVectors]);
      }
    }
  }
};

}  // namespace
}  // namespace rudnn::avx512_bf16

#include "cpu/attention_accelerated.inl.h"
#include "cpu/attention_accelerated_backward.inl.h"
#endif
