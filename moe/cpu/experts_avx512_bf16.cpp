#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx512_bf16.h"
#include "cpu/experts.h"
#include "cpu/experts_dot.inl.h"

namespace rudnn::avx512_bf16 {
namespace {

// Pairs of elements, multiplied and added to a sum each by one instruction.
struct PairProduct {
  using Element = bfloat16;
  static constexpr int kStep = 2;
  static constexpr bool kInPlace = false;

  static Vec operands(const bfloat16* pointer, Full) { return {_mm512_castsi512_ps(_mm512_loadu_si512(pointer))}; }
  static Vec operands(const bfloat16* pointer, Partial lanes) {
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32{1} << lanes.count) - 1, pointer))};
  }
  static Vec add_product(Vec a, Vec b, Vec sum) { return {_mm512_dpbf16_ps(sum.value, pairs(a), pairs(b))}; }

 private:
  static __m512bh pairs(Vec a) { return reinterpret_cast<__m512bh>(_mm512_castps_si512(a.value)); }
};

}  // namespace

void experts_activated(const ExpertsArgs& args, int64_t begin, int64_t end) {
  activated_units<PairProduct>(args, begin, end);
}

void experts_output(const ExpertsArgs& args, int64_t begin, int64_t end) {
  output_blocks<PairProduct>(args, begin, end);
}

}  // namespace rudnn::avx512_bf16
#endif
