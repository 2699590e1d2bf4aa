// The activations that gate one half of a row with the other. Free of Torch, so that device and ISA-specific code can
// include it.
#pragma once

#include <cstdint>

namespace rudnn {

enum class Activation : int8_t { kSilu, kGelu, kGeluTanh };

}  // namespace rudnn
