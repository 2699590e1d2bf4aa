// The sizes that routers take at most, for every backend and for shaders.
#pragma once

namespace rudnn {

enum RouterSize : int {
  // Of the grouped router: experts, groups, and chosen experts.
  kMostGroupedExperts = 1024,
  kMostGroups = 128,
  kMostGroupedTopK = 64,
  // Chosen experts of the selected router.
  kMostSelected = 64,
};

}  // namespace rudnn
