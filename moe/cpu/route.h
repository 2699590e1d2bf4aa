// The experts of a range of tokens and their weights: softmax, then the largest scores (ops/route.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous.
struct RouteArgs {
  DType dtype = DType::kFloat32;  // of logits and weights
  int64_t experts = 0;
  int64_t top_k = 0;
  bool renormalize = false;
  const void* logits = nullptr;  // [T, experts]
  int32_t* indices = nullptr;    // [T, top_k]
  void* weights = nullptr;       // [T, top_k]
};

struct RouteScratch {
  float* scores = nullptr;    // [experts]
  float* chosen = nullptr;    // [top_k]
  int32_t* orders = nullptr;  // [selection_orders(experts)]
  int32_t* maxima = nullptr;  // [selection_blocks(experts)]
};

using RouteRows = void(const RouteArgs& args, const RouteScratch& scratch, int64_t begin, int64_t end);

namespace generic {
RouteRows route_rows;
}  // namespace generic

namespace avx2 {
RouteRows route_rows;
}  // namespace avx2

namespace avx512 {
RouteRows route_rows;
}  // namespace avx512

}  // namespace rudnn
