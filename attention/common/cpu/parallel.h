// Splitting rows over PyTorch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace rudnn::cpu {

// Elements below which waking a second thread costs more than it saves.
inline constexpr int64_t kParallelElements = 32768;

inline int64_t ceil_div(int64_t numerator, int64_t denominator) { return (numerator + denominator - 1) / denominator; }

// Calls body(begin, end) on disjoint ranges that cover [0, count); item_elements is the work of one item. Which ranges
// a thread gets depends on the number of threads, so a result must not depend on where a range ends.
template <class Body>
void parallel_for(int64_t count, int64_t item_elements, const Body& body) {
  const int64_t grain = ceil_div(kParallelElements, item_elements);
  if (count <= grain) {
    if (count > 0) body(0, count);
    return;
  }
  torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace rudnn::cpu
