// What an RMS norm's result is multiplied by. Free of Torch, so that device and ISA-specific code can include it.
#pragma once

#include <cstdint>

namespace rudnn {

enum class Gate : int8_t { kNone, kSilu, kSigmoid };

}  // namespace rudnn
