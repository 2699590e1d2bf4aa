// The activation of the gate that an RMS norm is multiplied by. Free of Torch, so that device and ISA-specific code can
// include it.
#pragma once

#include <cstdint>

namespace rudnn {

enum class GateActivation : int8_t { kSilu, kSigmoid };

}  // namespace rudnn
