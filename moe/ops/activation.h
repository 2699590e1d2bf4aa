// The activations that gate one half of a row with the other. Free of Torch, so that device and ISA-specific code can
// include it.
#pragma once

namespace rudnn {

enum class Activation { kSilu, kGelu, kGeluTanh };

}  // namespace rudnn
