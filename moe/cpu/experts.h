// The experts of a range of features: projections by gate and up with SwiGLU, the projection by down, and their
// gradients. Free of Torch, so that ISA-specific code can include it.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace rudnn {

// The rows of one expert.
struct ExpertGroup {
  int64_t expert;
  int64_t begin;
  int64_t end;
  int64_t first_block;  // of rows in the packed layouts; groups begin new ones
};

// Rows of a block in the packed layouts of AMX.
inline constexpr int64_t kRowBlock = 32;

// A weight of all experts: its matrices are contiguous and lie `stride` elements apart.
template <class T>
struct ExpertMatrices {
  T* data = nullptr;
  int64_t stride = 0;
};

// Groups have rows, are disjoint and ascend. Pointers marked optional may be null.
struct ExpertsArgs {
  DType dtype = DType::kFloat32;  // of what is not said to be float
  int64_t hidden = 0;             // H
  int64_t intermediate = 0;       // I
  const ExpertGroup* groups = nullptr;
  int64_t group_count = 0;
  ExpertMatrices<const void> gate;  // [I, H]
  ExpertMatrices<const void> up;    // [I, H]
  ExpertMatrices<const void> down;  // [H, I]
  const void* input = nullptr;      // [R, H], or [T, H] if rows are summed
  void* packed_input = nullptr;     // the kernel's own copy of the input, if it makes one
  void* activated = nullptr;        // silu(gate x) * (up x), rounded, in a layout of the kernel's choice
  void* gate_projection = nullptr;  // [R, I], optional
  void* up_projection = nullptr;    // [R, I], there if gate_projection is
  void* output = nullptr;           // [R, H], or [T, H] if rows are summed
  // Optional: rows are then weighted and summed for each token, in their order.
  int64_t tokens = 0;                   // T
  const int32_t* row_tokens = nullptr;  // [R]
  const float* row_weights = nullptr;   // [R]
  float* sums = nullptr;                // [T, sum_stride], scratch
  int64_t sum_stride = 0;
};

// Groups are those of all experts, also of those without rows.
struct ExpertsBackwardArgs {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;  // R
  int64_t hidden = 0;
  int64_t intermediate = 0;
  const ExpertGroup* groups = nullptr;
  int64_t group_count = 0;
  ExpertMatrices<const void> gate;
  ExpertMatrices<const void> up;
  ExpertMatrices<const void> down;
  const void* grad = nullptr;             // [R, H]
  const void* input = nullptr;            // [R, H]
  const void* gate_projection = nullptr;  // [R, I]
  const void* up_projection = nullptr;    // [R, I]
  void* grad_input = nullptr;             // [R, H], optional
  ExpertMatrices<void> grad_gate;         // each optional
  ExpertMatrices<void> grad_up;
  ExpertMatrices<void> grad_down;
  bool rounded = false;  // whether the gradients of weights have the weights' dtype, else float32

  // Scratch of the phases in float32.
  float* wide_grad = nullptr;             // [R, H]
  float* activated = nullptr;             // [R, I]
  float* grad_gate_projection = nullptr;  // [R, I]
  float* grad_up_projection = nullptr;    // [R, I]

  // Scratch of AMX, by blocks of rows, amx::packed_size elements each.
  void* right_input = nullptr;
  void* left_grad = nullptr;
  void* right_activated = nullptr;
  void* left_grad_gate = nullptr;  // of the projections
  void* left_grad_up = nullptr;
  void* grad_gate_rows = nullptr;
  void* grad_up_rows = nullptr;
};

// The work of units [begin, end). Units may run at the same time.
using ExpertsPhase = void(const ExpertsArgs& args, int64_t begin, int64_t end);
using ExpertsBackwardPhase = void(const ExpertsBackwardArgs& args, int64_t begin, int64_t end);

// The same with scratch of the caller's for the weights of a unit: two panels of amx::packed_size elements, of the size
// that is summed over.
using ExpertsPanelPhase = void(const ExpertsBackwardArgs& args, void* panels, int64_t begin, int64_t end);

// Rows of weights of a unit, without AMX, as many as AVX-512 multiplies at a time, and with it: in experts_activated,
// whose units are the pairs of such a block and a group, groups first, half of them are of gate and half of up; in
// experts_output they are of down.
inline constexpr int64_t kDotBlock = 64;
inline constexpr int64_t kTileBlock = 32;
// Of a unit of the backward's phases, which are pairs with groups too: columns, and with AMX columns of the gradients
// of rows and rows of those of weights.
inline constexpr int64_t kGradientBlock = 64;
inline constexpr int64_t kTileGradientBlock = 32;

namespace avx512_bf16 {
ExpertsPhase experts_activated;
ExpertsPhase experts_output;
}  // namespace avx512_bf16

namespace amx {
ExpertsPhase experts_pack;  // units are blocks of rows
ExpertsPhase experts_activated;
ExpertsPhase experts_output;
ExpertsBackwardPhase experts_grad_pack;  // units are blocks of rows
ExpertsPanelPhase experts_grad_activated;
ExpertsPanelPhase experts_grad_input;
ExpertsBackwardPhase experts_grad_gate_up;
ExpertsBackwardPhase experts_grad_down;
// Elements that packed rows of so many features take, for each block of rows.
[[gnu::always_inline]] inline constexpr int64_t packed_size(int64_t features) {
  return (features + 31) / 32 * 32 * kRowBlock;
}
}  // namespace amx

namespace generic {
ExpertsPhase experts_activated;
ExpertsPhase experts_output;
ExpertsBackwardPhase experts_grad_activated;
ExpertsBackwardPhase experts_grad_input;
ExpertsBackwardPhase experts_grad_gate_up;
ExpertsBackwardPhase experts_grad_down;
}  // namespace generic

namespace avx2 {
ExpertsPhase experts_activated;
ExpertsPhase experts_output;
ExpertsBackwardPhase experts_grad_activated;
ExpertsBackwardPhase experts_grad_input;
ExpertsBackwardPhase experts_grad_gate_up;
ExpertsBackwardPhase experts_grad_down;
}  // namespace avx2

namespace avx512 {
ExpertsPhase experts_activated;
ExpertsPhase experts_output;
ExpertsBackwardPhase experts_grad_activated;
ExpertsBackwardPhase experts_grad_input;
ExpertsBackwardPhase experts_grad_gate_up;
ExpertsBackwardPhase experts_grad_down;
}  // namespace avx512

}  // namespace rudnn
