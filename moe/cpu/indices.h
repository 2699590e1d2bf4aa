// Experts chosen for tokens, as callers give them.
#pragma once

#include <cstdint>

namespace rudnn {

struct Indices {
  const void* data = nullptr;  // int32 or int64
  bool wide = false;           // int64

  // Always inline: compiled for several instruction sets, of which no copy may be shared.
  [[gnu::always_inline]] int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace rudnn
