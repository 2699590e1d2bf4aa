// combine: the weighted sum of the rows of a token's slots, and its gradients.
#pragma once

#include "cuda/arguments.cuh"

namespace rudnn {

struct CombineArgs {
  int64_t tokens;
  int64_t rows;
  int64_t width;
  int64_t top_k;
  const int32_t* slot_rows;  // [tokens, top_k]
  Factors weights;           // [tokens, top_k]; without data, all are 1
  const void* row_values;    // [rows, width]
  void* output;              // [tokens, width]
};

struct CombineBackwardArgs {
  int64_t tokens;
  int64_t rows;
  int64_t width;
  int64_t top_k;
  const int32_t* row_slots;  // [rows]
  const int32_t* slot_rows;  // [tokens, top_k]
  Factors weights;           // [tokens, top_k]
  const void* grad;          // [tokens, width]
  const void* row_values;    // [rows, width]
  void* grad_row_values;     // [rows, width]
  float* grad_weights;       // [tokens, top_k]
};

template <class T, int kVector>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) sum_slots(CombineArgs args) {
  const Piece<kVector> piece(args.tokens, args.width);
  const int64_t first_slot = piece.row() * args.top_k, slots = piece.exists() ? args.top_k : 0;
  float sums[kVectorsPerLane][kVector] = {};
  for (int64_t slot = first_slot; slot < first_slot + slots; ++slot) {
    const int64_t row = args.slot_rows[slot];
    if (row < 0 || row >= args.rows) continue;
    const float weight = args.weights.data != nullptr ? args.weights[slot] : 1.0f;
    const T* values = static_cast<const T*>(args.row_values) + row * args.width;
    piece.for_each_vector([&](int held, int64_t offset) {
      float part[kVector];
      load_floats(part, values + offset);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[held][i] += weight * part[i];
    });
  }
  T* output = static_cast<T*>(args.output) + piece.row() * args.width;
  piece.for_each_vector([&](int held, int64_t offset) { store_floats(output + offset, sums[held]); });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) spread_gradient(CombineBackwardArgs args) {
  const Piece<kVector> piece(args.rows, args.width);
  const int64_t slot = piece.exists() ? args.row_slots[piece.row()] : -1;
  const bool exists = slot >= 0 && slot < args.tokens * args.top_k;
  const float weight = exists ? args.weights[slot] : 0.0f;
  const T* grad = static_cast<const T*>(args.grad) + (exists ? slot / args.top_k : 0) * args.width;
  T* grad_row = static_cast<T*>(args.grad_row_values) + piece.row() * args.width;
  float values[kVectorsPerLane][kVector] = {};
  if (exists) {
    piece.for_each_vector([&](int held, int64_t offset) {
      load_floats(values[held], grad + offset);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[held][i] *= weight;
    });
  }
  piece.for_each_vector([&](int held, int64_t offset) { store_floats(grad_row + offset, values[held]); });
}

// The dot product of every kLanes-th vector of two rows, from `lane` on. Several partial sums keep its error small.
template <int kVector, int kLanes, class T>
__device__ __forceinline__ float partial_dot(const T* a, const T* b, int64_t width, int lane) {
  constexpr int kSums = 8 > kVector ? 8 / kVector : 1;  // of each element of a vector
  float sums[kSums][kVector] = {};
  for (int64_t first = int64_t{lane} * kVector; first < width; first += kSums * kLanes * kVector) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int64_t offset = first + int64_t{j} * kLanes * kVector;
      if (offset >= width) continue;
      float left[kVector], right[kVector];
      load_floats(left, a + offset);
      load_floats(right, b + offset);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[j][i] += left[i] * right[i];
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float of_element = 0.0f;
#pragma unroll
    for (int j = 0; j < kSums; ++j) of_element += sums[j][i];
    sum += of_element;
  }
  return sum;
}

// The gradient of each weight is one lane's, or with kLanes = 32 a warp's.
template <class T, int kVector, int kLanes>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize, kLeastBlocks) weight_gradients(CombineBackwardArgs args) {
  const int lane = threadIdx.x % kLanes;
  const int64_t slot = (int64_t{blockIdx.x} * kWarpsPerBlock * kWarpSize + threadIdx.x) / kLanes;
  if (slot >= args.tokens * args.top_k) return;
  const int64_t row = args.slot_rows[slot];
  float sum = 0.0f;
  if (row >= 0 && row < args.rows) {
    const T* values = static_cast<const T*>(args.row_values) + row * args.width;
    const T* grad = static_cast<const T*>(args.grad) + slot / args.top_k * args.width;
    sum = partial_dot<kVector, kLanes>(values, grad, args.width, lane);
  }
  if constexpr (kLanes > 1) sum = warp_sum(sum);
  if (lane == 0) args.grad_weights[slot] = sum;
}

}  // namespace rudnn
