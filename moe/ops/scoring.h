// How a router turns logits into scores, and the small number that renormalised weights are divided by. Free of Torch,
// so that device and ISA-specific code can include it.
#pragma once

#include <cstdint>

namespace rudnn {

enum class RouterScoring : int8_t { kSoftmax, kSigmoid };

// Added to the sum that the chosen scores are divided by, so that 0 / 0 is 0.
inline constexpr float kRenormalizeEpsilon = 1e-20f;

}  // namespace rudnn
