// The choice of an instruction set, made once when the kernel is loaded.
#pragma once

#include <string>

#include "common/cpu/isa.h"

namespace rudnn::cpu {

// In ascending order; each level includes those below it.
enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The highest level that this CPU has and that RUDNN_CPU_ISA, the name of a level or unset, allows.
Isa isa();

// The name of isa(). Throws std::runtime_error if RUDNN_CPU_ISA holds anything but a level's name.
std::string isa_name();

template <class Function>
Function* choose(Function* generic, Function* avx2, Function* avx512) {
  if (isa() >= Isa::kAvx512) return avx512;
  if (isa() >= Isa::kAvx2) return avx2;
  return generic;
}

}  // namespace rudnn::cpu

// The best version of a function that exists in the namespaces generic, avx2 and avx512.
#if RUDNN_X86_ISAS
#define RUDNN_CHOOSE(function) ::rudnn::cpu::choose(&generic::function, &avx2::function, &avx512::function)
#else
#define RUDNN_CHOOSE(function) (&generic::function)
#endif
