// What the routers' shaders and launchers agree on.
#pragma once

namespace rudnn {

enum RouterLimit : int {
  kSimdgroupSize = 32,  // of every Apple GPU
  kTokens = 4,          // of a threadgroup, each of which has a simdgroup
  kTokenThreads = kTokens * kSimdgroupSize,
  kHeldScores = 8,  // that a thread keeps of its token
};

}  // namespace rudnn
