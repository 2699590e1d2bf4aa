// Weighted sums of the rows that experts returned, back in the order of tokens, and their gradients (ops/combine.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// Rows are contiguous, `width` elements each. An entry of a map that is out of range counts as none.
struct CombineArgs {
  DType dtype = DType::kFloat32;  // of all rows
  int64_t width = 0;
  int64_t top_k = 0;
  int64_t rows = 0;                    // T * top_k
  const void* input = nullptr;         // [rows, width]
  const float* weights = nullptr;      // [T, top_k]; null where each is 1
  const int32_t* slot_rows = nullptr;  // [T, top_k]
  void* output = nullptr;              // [T, width]
};

struct CombineBackwardArgs {
  DType dtype = DType::kFloat32;
  int64_t width = 0;
  int64_t top_k = 0;
  int64_t rows = 0;                    // T * top_k
  const void* grad = nullptr;          // [T, width]
  const void* input = nullptr;         // [rows, width]
  const float* weights = nullptr;      // [T, top_k]
  const int32_t* row_slots = nullptr;  // [rows]
  const int32_t* slot_rows = nullptr;  // [T, top_k]
  void* grad_input = nullptr;          // [rows, width]
  float* grad_weights = nullptr;       // [T, top_k]
};

// Of a range of tokens.
using CombineTokens = void(const CombineArgs& args, int64_t begin, int64_t end);
// Writes the gradients of a range of rows, and those of the weights of slots that agree with their row about belonging
// together.
using CombineBackwardRows = void(const CombineBackwardArgs& args, int64_t begin, int64_t end);
// Writes the gradients of the weights of a range of slots, where combine_backward_rows does not.
using CombineBackwardSlots = void(const CombineBackwardArgs& args, int64_t begin, int64_t end);

namespace generic {
CombineTokens combine_tokens;
CombineBackwardRows combine_backward_rows;
CombineBackwardSlots combine_backward_slots;
}  // namespace generic

namespace avx2 {
CombineTokens combine_tokens;
CombineBackwardRows combine_backward_rows;
CombineBackwardSlots combine_backward_slots;
}  // namespace avx2

namespace avx512 {
CombineTokens combine_tokens;
CombineBackwardRows combine_backward_rows;
CombineBackwardSlots combine_backward_slots;
}  // namespace avx512

}  // namespace rudnn
