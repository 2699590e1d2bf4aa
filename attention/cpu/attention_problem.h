// What the launchers of attention and of its gradients share.
#pragma once

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

// Scratch for each range of units that may run at the same time.
class ThreadScratch {
 public:
  explicit ThreadScratch(int64_t floats)
      : floats_(floats), ranges_(static_cast<int64_t>(torch::stable::get_num_threads())) {}

  size_t bytes() const { return cpu::Workspace::size_of<float>(floats_ * ranges_); }
  void take(cpu::Workspace& workspace) { memory_ = workspace.take<float>(floats_ * ranges_); }
  float* at(int64_t range) const { return memory_ + range * floats_; }
  int64_t ranges() const { return ranges_; }

 private:
  int64_t floats_;
  int64_t ranges_;
  float* memory_ = nullptr;
};

// Calls body(scratch, begin, end) on ranges of `count` units, which are `work` multiplications in all. Each thread
// takes one range after the other, so that one whose core is slower takes fewer of them.
template <class Body>
void for_each_range(int64_t count, int64_t work, const ThreadScratch& scratch, const Body& body) {
  constexpr int64_t kRangesPerThread = 8;
  const int64_t size = cpu::ceil_div(count, scratch.ranges() * kRangesPerThread);
  std::atomic<int64_t> threads{0};
  std::atomic<int64_t> next{0};
  cpu::parallel_for(count, work / (count + 1) + 1, [&](int64_t, int64_t) {
    float* const memory = scratch.at(threads++);
    for (int64_t begin = next.fetch_add(size); begin < count; begin = next.fetch_add(size)) {
      body(memory, begin, begin + size < count ? begin + size : count);
    }
  });
}

}  // namespace rudnn
