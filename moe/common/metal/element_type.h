// Element types as function constants, for operands whose type is not the kernel's.
#pragma once

namespace rudnn {

enum ElementType : int { kFloatElements, kHalfElements, kBfloatElements };  // DType's order

}  // namespace rudnn
