// The interface between the registered ops and the backend that this build links.
#pragma once

#include "common/tensor.h"

namespace rudnn {

// Which row holds which expert's share of which token, all int32. Slot t * k + j is the j-th choice of token t. Rows
// are sorted by expert, and within an expert by slot. A slot whose index is outside [0, E) has no row; the rows from
// expert_offsets[E] on are then nobody's.
struct RowMap {
  const Tensor* expert_offsets = nullptr;  // [E + 1]: the first row of each expert
  const Tensor* row_experts = nullptr;     // [R], -1 for a row that is nobody's
  const Tensor* row_tokens = nullptr;      // [R], the same
  const Tensor* row_slots = nullptr;       // [R], the same
  const Tensor* slot_rows = nullptr;       // [T, k], -1 for a slot without a row
};

// Contiguous tensors on one device. T may be 0: expert_offsets are then to be zeroed.
struct DispatchCall {
  const Tensor* input = nullptr;    // [T, H]
  const Tensor* indices = nullptr;  // int32 or int64 [T, k]
  RowMap map;                       // written
  const Tensor* values = nullptr;   // [R, H], the input's dtype; written; rows that are nobody's are 0
};

void launch_dispatch(const DispatchCall& call);

// grad_input[t] = the sum over j of grad_values[slot_rows[t, j]], in float32 and in the order of j, rounded once. What
// slot_rows holds is not trusted: an entry outside [0, R) adds nothing. At least one token.
struct DispatchBackwardCall {
  const Tensor* grad_values = nullptr;  // [R, H]
  const Tensor* slot_rows = nullptr;    // int32 [T, k]
  const Tensor* grad_input = nullptr;   // [T, H]
};

void launch_dispatch_backward(const DispatchBackwardCall& call);

}  // namespace rudnn
