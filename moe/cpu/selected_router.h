// The weights of given experts for a range of tokens, and the gradient of their logits (ops/selected_router.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/indices.h"
#include "ops/scoring.h"

namespace rudnn {

// Rows are contiguous.
struct SelectedRouterArgs {
  DType dtype = DType::kFloat32;  // of the logits and their gradient
  int64_t experts = 0;
  int64_t top_k = 0;  // at most kMostSelected
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool renormalize = false;
  float scale = 1;
  const void* logits = nullptr;         // [T, experts]
  Indices indices;                      // [T, top_k]
  float* weights = nullptr;             // [T, top_k]; the forward's
  const float* grad_weights = nullptr;  // [T, top_k]; the backward's
  void* grad_logits = nullptr;          // [T, experts]; the backward's
};

using SelectedRouterRows = void(const SelectedRouterArgs& args, int64_t begin, int64_t end);
// grad_scores: float32 [experts], zeros before and after.
using SelectedRouterBackwardRows = void(const SelectedRouterArgs& args, int64_t begin, int64_t end, float* grad_scores);

namespace generic {
SelectedRouterRows selected_router_rows;
SelectedRouterBackwardRows selected_router_backward_rows;
}  // namespace generic

namespace avx2 {
SelectedRouterRows selected_router_rows;
SelectedRouterBackwardRows selected_router_backward_rows;
}  // namespace avx2

namespace avx512 {
SelectedRouterRows selected_router_rows;
SelectedRouterBackwardRows selected_router_backward_rows;
}  // namespace avx512

}  // namespace rudnn
