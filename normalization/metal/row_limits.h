// What shaders and the plans of their launches agree on.
#pragma once

namespace rudnn {

enum RowLimit : int {
  kSimdgroupSize = 32,      // of every Apple GPU
  kRowsPerThreadgroup = 4,  // where a simdgroup has a row
  kMostThreads = 512,       // of a threadgroup
  kMostSimdgroups = kMostThreads / kSimdgroupSize,
  kVectorElements = 4,
  // Of a row, what a thread keeps: so many vectors, or twice as many single elements. A backward kernel has two rows
  // and sums for the parameters.
  kForwardVectors = 4,
  kForwardElements = 2 * kForwardVectors,
  kBackwardVectors = 2,
  kBackwardElements = 2 * kBackwardVectors,
  // Threads of a threadgroup that sums parameters' gradients.
  kSumColumns = 32,
  kSumShares = 8,
};

}  // namespace rudnn
