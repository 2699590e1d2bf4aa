// The scratch of a selection (selection.inl.h).
#pragma once

#include <cstdint>

namespace rudnn {

// Orders whose maximum is kept.
inline constexpr int32_t kSelectionBlock = 16;

constexpr int64_t selection_blocks(int64_t length) { return (length + kSelectionBlock - 1) / kSelectionBlock; }

constexpr int64_t selection_orders(int64_t length) { return selection_blocks(length) * kSelectionBlock; }

}  // namespace rudnn
