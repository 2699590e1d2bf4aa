// What the launchers of the experts and of their gradients share.
#pragma once

#include <vector>

#include "cpu/experts.h"
#include "ops/experts.h"

namespace rudnn {

// Bytes of an element.
inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline ExpertMatrices<const void> matrices_of(const Tensor& weight) {
  return {weight.const_data_ptr(), weight.stride(0)};
}

template <class Args>
void set_weights(const ExpertWeights& weights, Args& args) {
  args.dtype = dtype_of(*weights.down);
  args.hidden = weights.down->size(1);
  args.intermediate = weights.down->size(2);
  args.gate = matrices_of(*weights.gate);
  args.up = matrices_of(*weights.up);
  args.down = matrices_of(*weights.down);
}

// The groups of all experts. The offsets are not trusted: groups come out disjoint and within the rows.
std::vector<ExpertGroup> groups_of(const int32_t* offsets, int64_t experts, int64_t rows);
std::vector<ExpertGroup> groups_of(const Tensor& expert_offsets, int64_t rows);

// Blocks of rows in the packed layouts of AMX.
int64_t blocks_of(const std::vector<ExpertGroup>& groups);

// Zeroes the rows that belong to no group; nothing where there is no tensor.
void clear_other_rows(const std::vector<ExpertGroup>& groups, const Tensor* rows);

}  // namespace rudnn
