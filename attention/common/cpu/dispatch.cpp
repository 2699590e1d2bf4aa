#include "common/cpu/dispatch.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

namespace rudnn::cpu {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx"};
static_assert(std::size(kNames) == static_cast<size_t>(Isa::kAmx) + 1, "one name for each level, in order");

Isa detect() {
#if RUDNN_X86_ISAS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return Isa::kGeneric;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") ? Isa::kAmx : Isa::kAvx512Bf16;
#else
  return Isa::kGeneric;
#endif
}

struct Choice {
  Isa isa;
  std::string rejected_cap;  // the value of RUDNN_CPU_ISA if it names no level
};

Choice choose_at_load() {
  const Isa available = detect();
  const char* cap = std::getenv("RUDNN_CPU_ISA");
  if (cap == nullptr || *cap == '\0') return {available, ""};
  const auto* name = std::find(std::begin(kNames), std::end(kNames), std::string(cap));
  if (name == std::end(kNames)) return {Isa::kGeneric, cap};
  return {std::min(available, static_cast<Isa>(name - std::begin(kNames))), ""};
}

const Choice kChoice = choose_at_load();

}  // namespace

Isa isa() { return kChoice.isa; }

std::string isa_name() {
  if (!kChoice.rejected_cap.empty()) {
    std::string message = "RUDNN_CPU_ISA must be one of";
    for (const char* name : kNames) message += std::string(" ") + name;
    throw std::runtime_error(message + ", got '" + kChoice.rejected_cap + "'");
  }
  return kNames[static_cast<int>(kChoice.isa)];
}

}  // namespace rudnn::cpu
