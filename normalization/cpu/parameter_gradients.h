// Gradients of a norm's parameters: sums over all rows, in an order that depends on the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/tensor.h"

namespace rudnn::cpu {

// Calls body(begin, end, sums) over blocks of rows in parallel. sums[p] is a zeroed float32 [width], to which body adds
// the rows' contributions to gradients[p]; null where gradients[p] is null. The blocks' sums are then added in order,
// in float64, and written to the gradients, which are float32 [width] each.
template <int kParameters, class Body>
void sum_parameter_gradients(int64_t rows, int64_t width, const Tensor* const (&gradients)[kParameters],
                             const Body& body) {
  if (std::all_of(gradients, gradients + kParameters, [](const Tensor* gradient) { return gradient == nullptr; })) {
    float* const no_sums[kParameters] = {};
    parallel_for(rows, width, [&](int64_t begin, int64_t end) { body(begin, end, no_sums); });
    return;
  }
  // A chunk of blocks is the work of one thread at a time; at most 128 of them, or their totals would outgrow the rows.
  const int64_t least_rows = std::max(ceil_div(kParallelElements, width), ceil_div(rows, 128));
  // In so short a block a float32 sum loses no more than PyTorch's own; wide rows get shorter ones, to have chunks to
  // share out.
  const int64_t block_rows = std::clamp(least_rows, int64_t{4}, int64_t{16});
  const int64_t chunk_rows = ceil_div(least_rows, block_rows) * block_rows;
  const int64_t chunks = ceil_div(rows, chunk_rows);

  std::vector<double> totals[kParameters];
  for (int p = 0; p < kParameters; ++p) {
    if (gradients[p] != nullptr) totals[p].resize(chunks * width);
  }
  parallel_for(chunks, chunk_rows * width, [&](int64_t first, int64_t last) {
    std::vector<float> block_sums[kParameters];
    float* sums[kParameters];
    for (int p = 0; p < kParameters; ++p) {
      if (gradients[p] != nullptr) block_sums[p].resize(width);
      sums[p] = gradients[p] != nullptr ? block_sums[p].data() : nullptr;
    }
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
      for (int64_t begin = chunk * chunk_rows; begin < end; begin += block_rows) {
        for (auto& block_sum : block_sums) std::fill(block_sum.begin(), block_sum.end(), 0.0f);
        body(begin, std::min(end, begin + block_rows), sums);
        for (int p = 0; p < kParameters; ++p) {
          double* total = totals[p].data() + chunk * width;
          for (size_t i = 0; i < block_sums[p].size(); ++i) total[i] += block_sums[p][i];
        }
      }
    }
  });
  for (int p = 0; p < kParameters; ++p) {
    if (gradients[p] == nullptr) continue;
    auto* gradient = static_cast<float*>(gradients[p]->mutable_data_ptr());
    parallel_for(width, std::max(chunks, int64_t{1}), [&](int64_t begin, int64_t end) {
      double* sum = totals[p].data();
      for (int64_t chunk = 1; chunk < chunks; ++chunk) {
        for (int64_t i = begin; i < end; ++i) sum[i] += totals[p][chunk * width + i];
      }
      for (int64_t i = begin; i < end; ++i) gradient[i] = chunks > 0 ? static_cast<float>(sum[i]) : 0.0f;
    });
  }
}

}  // namespace rudnn::cpu
