// softmax_last_axis: y = exp(x - max(x)) / sum(exp(x - max(x))).
#pragma once

#include "cuda/row.cuh"

namespace rudnn {

// Rows are contiguous, `width` elements of the kernel's T each.
struct SoftmaxArgs {
  int64_t rows;
  int64_t width;
  const void* input;  // [rows, width]
  void* output;       // [rows, width]
};

struct SoftmaxBackwardArgs {
  int64_t rows;
  int64_t width;
  const void* grad;    // [rows, width]
  const void* output;  // [rows, width], what the softmax gave
  void* grad_input;    // [rows, width]
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks) softmax_last_axis(SoftmaxArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    T* output = static_cast<T*>(args.output) + row * width;
    Row<T, Shape> x;
    x.load(static_cast<const T*>(args.input) + row * width, width);

    // NaN is left out of the maximum, and comes back in the exponential and so in the sum.
    float largest = -INFINITY;
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N];
      x.get(values, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) largest = fmaxf(largest, values[i]);
    });
    largest = row_max<Shape>(largest);

    float sum[1] = {0.0f};
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N];
      x.get(values, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[0] += expf(values[i] - largest);
    });
    row_sum<Shape>(sum);

    const float reciprocal = 1.0f / sum[0];
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N];
      x.get(values, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = expf(values[i] - largest) * reciprocal;
      store_floats(output + offset, values);
    });
  }
}

// The gradient of x is y * (grad - sum(grad * y)).
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks)
    softmax_last_axis_backward(SoftmaxBackwardArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    T* grad_input = static_cast<T*>(args.grad_input) + row * width;
    Row<T, Shape> y, grad;
    y.load(static_cast<const T*>(args.output) + row * width, width);
    grad.load(static_cast<const T*>(args.grad) + row * width, width);

    float product[1] = {0.0f};
    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], upstream[N];
      y.get(values, slot, offset);
      grad.get(upstream, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) product[0] += upstream[i] * values[i];
    });
    row_sum<Shape>(product);

    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], upstream[N];
      y.get(values, slot, offset);
      grad.get(upstream, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] *= upstream[i] - product[0];
      store_floats(grad_input + offset, values);
    });
  }
}

}  // namespace rudnn
