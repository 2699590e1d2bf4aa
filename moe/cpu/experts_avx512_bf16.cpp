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
  using Operand = __m512bh;
  static constexpr int kStep = 32;

  static Operand operand(const bfloat16* pointer, Full) {
    return reinterpret_cast<Operand>(_mm512_loadu_si512(pointer));
  }
  static Operand operand(const bfloat16* pointer, int count) {
    return reinterpret_cast<Operand>(_mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, pointer));
  }
  static void pin_operand(Operand& operand) { __asm__("" : "+v"(operand)); }
  static Vec add_product(Operand a, Operand b, Vec sum) { return {_mm512_dpbf16_ps(sum.value, a, b)}; }
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
