// The sizes that routers take at most. Free of Torch, so that device and ISA-specific code can include it.
#pragma once

#include <cstdint>

namespace rudnn {

// The most experts, groups and chosen experts that the grouped router takes.
inline constexpr int64_t kMaxGroupedExperts = 1024;
inline constexpr int64_t kMaxGroups = 128;
inline constexpr int64_t kMaxGroupedTopK = 64;

// Experts of a token that the selected router takes at most.
inline constexpr int64_t kMaxSelected = 64;

}  // namespace rudnn
