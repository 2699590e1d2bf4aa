// What the launchers of attention and of its gradients share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/cpu/parallel.h"
#include "common/cpu/workspace.h"
#include "cpu/attention.h"
#include "ops/attention.h"

namespace rudnn {

// [B, H, S, D] of a tensor.
HeadRows head_rows_of(const Tensor& tensor);

// `sinks` are those of the inputs in float32, or null.
AttentionProblem problem_of(const AttentionInputs& inputs, const AttentionOptions& options, const float* sinks);

// The multiplications of the scores and of the values.
inline int64_t work_of(const AttentionProblem& problem) {
  return problem.batch * problem.heads * problem.queries * problem.keys * (problem.head_dim + problem.value_dim);
}

// Scratch for each thread.
class ThreadScratch {
 public:
  explicit ThreadScratch(int64_t floats)
      : floats_(floats), threads_(static_cast<int64_t>(torch::stable::get_num_threads())) {}

  size_t bytes() const { return cpu::Workspace::size_of<float>(floats_ * threads_); }
  void take(cpu::Workspace& workspace) { memory_ = workspace.take<float>(floats_ * threads_); }
  float* at(int64_t thread) const { return memory_ + thread * floats_; }

 private:
  int64_t floats_;
  int64_t threads_;
  float* memory_ = nullptr;
};

// Ranges that a thread would take if all were equally fast, and the units that the smallest holds if there are so many:
// tiles of rows may share what they read of the keys.
inline constexpr int64_t kRangesPerThread = 8;
inline constexpr int64_t kSmallestRange = 8;

// Calls body(scratch, begin, end) on ranges of `count` units, which are `work` multiplications in all. Each thread
// takes one range after the other, so that one whose core is slower takes fewer of them.
template <class Body>
void for_each_range(int64_t count, int64_t work, const ThreadScratch& scratch, const Body& body) {
  std::atomic<int64_t> threads{0};
  std::atomic<int64_t> next{0};
  cpu::parallel_for(count, work / (count + 1) + 1, [&](int64_t first, int64_t last) {
    float* const memory = scratch.at(threads++);
    const int64_t size = std::max(cpu::ceil_div(last - first, kRangesPerThread), kSmallestRange);
    for (int64_t begin = next.fetch_add(size); begin < count; begin = next.fetch_add(size)) {
      body(memory, begin, std::min(begin + size, count));
    }
  });
}

}  // namespace rudnn
