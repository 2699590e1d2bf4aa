// Element types and the visitor that turns a run-time dtype into a template argument. Free of Torch, so that device and
// ISA-specific code can include it.
#pragma once

#include <cstdint>

namespace rudnn {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

struct float16 {
  uint16_t bits;
};

struct bfloat16 {
  uint16_t bits;
};

template <class T>
struct TypeTag {
  using type = T;
};

// Calls visitor(TypeTag<T>{}) with the C++ type of dtype.
template <class Visitor>
inline void visit_dtype(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::kFloat32:
      return visitor(TypeTag<float>{});
    case DType::kFloat16:
      return visitor(TypeTag<float16>{});
    case DType::kBFloat16:
      return visitor(TypeTag<bfloat16>{});
  }
}

}  // namespace rudnn
