// Gradients of a norm's parameters: sums over all rows, in an order that depends on the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/tensor.h"

namespace rudnn::cpu {

// Calls body(begin, end, sums) over chunks of rows in parallel. sums[p] is a zeroed float32 [width] of the chunk's own,
// to which it adds its rows' contributions to gradients[p]; null where gradients[p] is null. The chunks' sums are then
// added in order and written to the gradients, which are float32 [width] each.
template <int kParameters, class Body>
void sum_parameter_gradients(int64_t rows, int64_t width, const Tensor* const (&gradients)[kParameters],
                             const Body& body) {
  // Large enough that adding the sums up costs little beside the rows; at most 128 chunks.
  const int64_t chunk_rows = std::max({int64_t{8}, ceil_div(kParallelElements, width), ceil_div(rows, 128)});
  const int64_t chunks = ceil_div(rows, chunk_rows);

  std::vector<float> partial_sums[kParameters];
  for (int p = 0; p < kParameters; ++p) {
    if (gradients[p] != nullptr) partial_sums[p].resize(chunks * width);
  }
  parallel_for(chunks, chunk_rows * width, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      float* sums[kParameters];
      for (int p = 0; p < kParameters; ++p) {
        sums[p] = gradients[p] != nullptr ? partial_sums[p].data() + chunk * width : nullptr;
      }
      body(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), sums);
    }
  });
  for (int p = 0; p < kParameters; ++p) {
    if (gradients[p] == nullptr) continue;
    auto* gradient = static_cast<float*>(gradients[p]->mutable_data_ptr());
    const float* partial = partial_sums[p].data();
    parallel_for(width, std::max(chunks, int64_t{1}), [&](int64_t begin, int64_t end) {
      std::fill(gradient + begin, gradient + end, 0.0f);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t i = begin; i < end; ++i) gradient[i] += partial[chunk * width + i];
      }
    });
  }
}

}  // namespace rudnn::cpu
