// The experts of a range of tokens and their weights: sigmoid, the best groups, and their largest corrected scores
// (ops/route_sigmoid_grouped.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous.
struct RouteSigmoidGroupedArgs {
  DType dtype = DType::kFloat32;  // of logits and weights
  int64_t experts = 0;            // at most kMostGroupedExperts
  int64_t top_k = 0;              // at most kMostGroupedTopK
  int64_t groups = 0;             // at most kMostGroups
  int64_t selected_groups = 0;
  bool group_top_two = false;
  bool renormalize = false;
  float scale = 1;
  const void* logits = nullptr;  // [T, experts]
  const float* bias = nullptr;   // [experts], optional
  int32_t* indices = nullptr;    // [T, top_k]
  void* weights = nullptr;       // [T, top_k]
};

using RouteSigmoidGroupedRows = void(const RouteSigmoidGroupedArgs& args, int64_t begin, int64_t end);

namespace generic {
RouteSigmoidGroupedRows route_sigmoid_grouped_rows;
}  // namespace generic

namespace avx2 {
RouteSigmoidGroupedRows route_sigmoid_grouped_rows;
}  // namespace avx2

namespace avx512 {
RouteSigmoidGroupedRows route_sigmoid_grouped_rows;
}  // namespace avx512

}  // namespace rudnn
