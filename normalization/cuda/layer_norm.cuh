// layer_norm and fused_add_layer_norm: y = (x - mean(x)) / sqrt(variance(x) + epsilon) * gamma + beta.
#pragma once

#include "cuda/norm.cuh"

namespace rudnn {

struct LayerNormArgs : NormForwardArgs {
  Parameter beta;  // optional
};

struct LayerNormBackwardArgs : NormBackwardArgs {
  float* beta_partials;  // [rows of threads, width], optional
};

template <class T, class Shape>
__device__ __forceinline__ float mean_of(const Row<T, Shape>& row, int64_t width, float factor) {
  float sum[1] = {0.0f};
  for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
    float values[Shape::kVector];
    row.get(values, slot, offset);
#pragma unroll
    for (int i = 0; i < Shape::kVector; ++i) sum[0] += values[i] * factor;
  });
  row_sum<Shape>(sum);
  return sum[0] / static_cast<float>(width);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks) layer_norm(LayerNormArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    const int64_t start = row * width;
    T* output = static_cast<T*>(args.output) + start;
    Row<T, Shape> x;
    load_input(x, args, start);

    RowRoots roots;
    const LayerStatistics statistics = measure_in_range(x, args, roots, [&](float factor, float) {
      const float centre = mean_of(x, width, factor);
      float sums[2] = {0.0f, 0.0f};
      for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
        float values[N];
        x.get(values, slot, offset);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float deviation = values[i] * factor - centre;
          sums[0] += deviation;
          sums[1] += deviation * deviation;
        }
      });
      row_sum<Shape>(sums);
      return statistics_from(factor, centre, {sums[0], sums[1], 0.0f, 0.0f}, 1.0f, static_cast<float>(width));
    });

    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], weight[N], shift[N] = {};
      x.get(values, slot, offset);
      load_parameter<T>(weight, args.gamma, offset);
      if (args.beta.data != nullptr) load_parameter<T>(shift, args.beta, offset);
#pragma unroll
      for (int i = 0; i < N; ++i)
        values[i] = fmaf(statistics.deviation(values[i]) * roots.normalise, weight[i], shift[i]);
      store_floats(output + offset, values);
    });
  }
}

// With n the normalised row and d = grad * gamma, the gradient of x is
// (d - mean(d) - n * mean(d * n)) / sqrt(variance(x) + epsilon).
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks) layer_norm_backward(LayerNormBackwardArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  ParameterSum<Shape> gamma_sum(args.gamma_partials, width), beta_sum(args.beta_partials, width);
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    const int64_t start = row * width;
    Row<T, Shape> x, grad;
    x.load(static_cast<const T*>(args.input) + start, width);
    grad.load(static_cast<const T*>(args.grad) + start, width);

    RowRoots roots;
    const LayerStatistics statistics = measure_in_range(x, args, roots, [&](float factor, float share) {
      const float centre = mean_of(x, width, factor);
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
        float values[N], upstream[N], weight[N];
        x.get(values, slot, offset);
        grad.get(upstream, slot, offset);
        load_parameter<T>(weight, args.gamma, offset);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float deviation = values[i] * factor - centre;
          const float product = upstream[i] * weight[i] * share;
          sums[0] += deviation;
          sums[1] += deviation * deviation;
          sums[2] += product;
          sums[3] += product * deviation;
        }
      });
      row_sum<Shape>(sums);
      return statistics_from(factor, centre, {sums[0], sums[1], sums[2], sums[3]}, share, static_cast<float>(width));
    });
    const float projection = projection_of(statistics.product, roots.normalise);

    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], upstream[N];
      x.get(values, slot, offset);
      grad.get(upstream, slot, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = statistics.deviation(values[i]) * roots.normalise;
      if (gamma_sum.wanted()) {
        float products[N];
#pragma unroll
        for (int i = 0; i < N; ++i) products[i] = upstream[i] * values[i];
        gamma_sum.add(products, slot, offset);
      }
      if (beta_sum.wanted()) beta_sum.add(upstream, slot, offset);
      if (args.grad_input == nullptr) return;
      float weight[N];
      load_parameter<T>(weight, args.gamma, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // Rounded as in the mean, so that a row of one element has a gradient of exactly 0.
        const float centred = upstream[i] * weight[i] - statistics.upstream;
        upstream[i] = fmaf(-values[i], projection, centred) * roots.gradient[0] * roots.gradient[1];
      }
      store_grad_input<T>(args, start + offset, upstream);
    });
  }
  gamma_sum.store();
  beta_sum.store();
}

}  // namespace rudnn
