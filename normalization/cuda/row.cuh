// How a row is shared out among threads, and what they do with it together.
#pragma once

#include "common/cuda/device.cuh"
#include "ops/norm_args.h"
#include "ops/row_scale.h"

namespace rudnn {

// kThreads threads work on a row, in vectors of kVector elements: thread t has the vectors t, t + kThreads, ... It
// keeps its first kHeld vectors in registers; what longer rows have beyond them it reads again each time. Rows of a
// warp share a block of four warps; a wider row has a block of its own.
constexpr int kWarpsPerBlock = 4;
template <int vector, int threads, int held>
struct RowShape {
  static constexpr int kVector = vector;
  static constexpr int kThreads = threads;
  static constexpr int kHeld = held;
  static constexpr int kBlock = threads == kWarpSize ? kWarpsPerBlock * kWarpSize : threads;
  static constexpr int kRowsPerBlock = kBlock / kThreads;
  // Of a multiprocessor: 512 threads, so that each may have 128 registers. Left to itself, ptxas spills a few of them
  // to fit more threads.
  static constexpr int kLeastBlocks = 512 / kBlock;
};

// The rows of this thread are first_row, first_row + row_step, ...
template <class Shape>
__device__ __forceinline__ int64_t first_row() {
  return int64_t{blockIdx.x} * Shape::kRowsPerBlock + threadIdx.x / Shape::kThreads;
}
template <class Shape>
__device__ __forceinline__ int64_t row_step() {
  return int64_t{gridDim.x} * Shape::kRowsPerBlock;
}

constexpr int kNotHeld = -1;

// Calls visit(slot, offset) for each vector of this thread: the slot of a held one or kNotHeld, and the vector's offset
// in the row. kVector divides the width.
template <class Shape, class Visit>
__device__ __forceinline__ void for_each_vector(int64_t width, Visit visit) {
  constexpr int kStep = Shape::kThreads * Shape::kVector;
  int64_t offset = threadIdx.x % Shape::kThreads * Shape::kVector;
#pragma unroll
  for (int slot = 0; slot < Shape::kHeld; ++slot, offset += kStep)
    if (offset < width) visit(slot, offset);
#pragma unroll 1
  for (; offset < width; offset += kStep) visit(kNotHeld, offset);
}

// The thread's share of a row of T.
template <class T, class Shape>
class Row {
 public:
  __device__ __forceinline__ void load(const T* row, int64_t width) {
    row_ = row;
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      if (slot != kNotHeld) held_[slot] = load_vec<Shape::kVector>(row + offset);
    });
  }

  // Becomes a + b, rounded, and writes it to `sum`.
  __device__ __forceinline__ void load_sum(const T* a, const T* b, T* sum, int64_t width) {
    row_ = sum;
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float left[Shape::kVector], right[Shape::kVector];
      load_floats(left, a + offset);
      load_floats(right, b + offset);
#pragma unroll
      for (int i = 0; i < Shape::kVector; ++i) left[i] += right[i];
      const auto result = rounded_to<T>(left);
      store_vec(sum + offset, result);
      if (slot != kNotHeld) held_[slot] = result;
    });
  }

  // The elements of one vector, with the arguments that for_each_vector gives.
  __device__ __forceinline__ void get(float (&out)[Shape::kVector], int slot, int64_t offset) const {
    const auto values = slot != kNotHeld ? held_[slot] : load_vec<Shape::kVector>(row_ + offset);
#pragma unroll
    for (int i = 0; i < Shape::kVector; ++i) out[i] = to_float(values[i]);
  }

 private:
  const T* row_;
  Vec<T, Shape::kVector> held_[Shape::kHeld];
};

// A parameter of a norm: [width], float32 or of the rows' dtype.
struct Parameter {
  const void* data;
  bool is_float32;
};
template <class T, int kVector>
__device__ __forceinline__ void load_parameter(float (&out)[kVector], Parameter parameter, int64_t offset) {
  if (parameter.is_float32)
    load_floats(out, static_cast<const float*>(parameter.data) + offset);
  else
    load_floats(out, static_cast<const T*>(parameter.data) + offset);
}

// Combines kValues values of each thread of a row over the row, in a fixed order; all of its threads call and receive
// the results. In a row of more than a warp this takes two barriers of the block.
template <class Shape, int kValues, class Op>
__device__ __forceinline__ void row_reduce(float (&values)[kValues], Op op) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = warp_reduce(values[i], op);
  if constexpr (Shape::kThreads > kWarpSize) {
    constexpr int kWarps = Shape::kThreads / kWarpSize;
    __shared__ float partial[kValues][kWarps];
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (lane == 0) partial[i][threadIdx.x / kWarpSize] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_reduce<kWarps>(partial[i][lane % kWarps], op);
    __syncthreads();  // the next call writes `partial` again
  }
}
template <class Shape, int kValues>
__device__ __forceinline__ void row_sum(float (&values)[kValues]) {
  row_reduce<Shape>(values, [](float a, float b) { return a + b; });
}
// Leaves NaN out.
template <class Shape>
__device__ __forceinline__ float row_max(float value) {
  float values[1] = {value};
  row_reduce<Shape>(values, [](float a, float b) { return fmaxf(a, b); });
  return values[0];
}

// The largest magnitude of a row, without NaN.
template <class T, class Shape>
__device__ __forceinline__ float largest_magnitude(const Row<T, Shape>& row, int64_t width) {
  float largest = 0.0f;
  for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
    float values[Shape::kVector];
    row.get(values, slot, offset);
#pragma unroll
    for (int i = 0; i < Shape::kVector; ++i) largest = fmaxf(largest, fabsf(values[i]));
  });
  return row_max<Shape>(largest);
}

// A mean of squares and the roots that follow from it with epsilon: of the row as it is, or multiplied by a power of
// two where that leaves float32's range. measure(factor, share) gives the statistics of the row times `factor`: an
// object with members mean_square, without epsilon, and usable(), which says whether its other sums are in range. Those
// it takes of terms multiplied by `share`, and divides by it what it gives.
template <class T, class Shape, class Measure>
__device__ __forceinline__ auto measure_in_range(const Row<T, Shape>& row, const NormArgs& args, RowRoots& roots,
                                                 Measure measure) {
  float factor = 1.0f, share = 1.0f;
#pragma unroll 1
  for (bool scaled = false;; scaled = true) {
    const auto statistics = measure(factor, share);
    if (scaled) {
      roots = roots_of_scaled(statistics.mean_square, factor, args.root_epsilon);
      return statistics;
    }
    const float mean_square = statistics.mean_square + args.epsilon;
    if (in_range(mean_square) && statistics.usable()) {
      roots = roots_of(mean_square);
      return statistics;
    }
    factor = power_of_two_scale(largest_magnitude(row, args.width));
    share = 0.5f * power_of_two_scale(static_cast<float>(args.width));  // exact, and less than 1 / width
  }
}

}  // namespace rudnn
