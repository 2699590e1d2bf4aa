// rms_norm, rms_norm_gated and fused_add_rms_norm: y = x / sqrt(mean(x^2) + epsilon) * (gamma + gamma_offset)
// [* activation(gate)].
#pragma once

#include "cuda/norm.cuh"
#include "ops/gate.h"

namespace rudnn {

struct RmsNormArgs : NormForwardArgs {
  float gamma_offset;  // 1 for zero-centred parameters
  GateActivation activation;
  const void* gate;  // [rows, width]
};

struct RmsNormBackwardArgs : NormBackwardArgs {
  float gamma_offset;
  GateActivation activation;
  const void* gate;  // [rows, width]
  void* grad_gate;   // [rows, width], optional
};

struct Activation {
  float value;
  float slope;
};
__device__ __forceinline__ Activation activate(GateActivation activation, float z) {
  const float probability = 1.0f / (1.0f + expf(-z));
  const float complement = 1.0f - probability;
  if (activation == GateActivation::kSigmoid) return {probability, probability * complement};
  const float silu = z * probability;
  return {silu, fmaf(silu, complement, probability)};
}

template <class T, class Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks) rms_norm(RmsNormArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    const int64_t start = row * width;
    const T* gate = kGated ? static_cast<const T*>(args.gate) + start : nullptr;
    T* output = static_cast<T*>(args.output) + start;
    Row<T, Shape> x;
    load_input(x, args, start);

    RowRoots roots;
    const RmsStatistics statistics = measure_in_range(x, args, roots, [&](float factor, float) {
      float squares[1] = {0.0f};
      for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
        float values[N];
        x.get(values, slot, offset);
#pragma unroll
        for (int i = 0; i < N; ++i) squares[0] += (values[i] * factor) * (values[i] * factor);
      });
      row_sum<Shape>(squares);
      return RmsStatistics{factor, squares[0] / static_cast<float>(width), 0.0f};
    });

    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], weight[N];
      x.get(values, slot, offset);
      load_parameter<T>(weight, args.gamma, offset);
#pragma unroll
      for (int i = 0; i < N; ++i)
        values[i] = values[i] * statistics.factor * roots.normalise * (weight[i] + args.gamma_offset);
      if constexpr (kGated) {
        float gates[N];
        load_floats(gates, gate + offset);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] *= activate(args.activation, gates[i]).value;
      }
      store_floats(output + offset, values);
    });
  }
}

// With n = x / sqrt(mean(x^2) + epsilon) and d = grad * weight [* activation(gate)], the gradient of x is
// (d - n * mean(d * n)) / sqrt(mean(x^2) + epsilon).
template <class T, class Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kLeastBlocks) rms_norm_backward(RmsNormBackwardArgs args) {
  constexpr int N = Shape::kVector;
  const int64_t width = args.width;
  ParameterSum<Shape> gamma_sum(args.gamma_partials, width);
  for (int64_t row = first_row<Shape>(); row < args.rows; row += row_step<Shape>()) {
    const int64_t start = row * width;
    const T* gate = kGated ? static_cast<const T*>(args.gate) + start : nullptr;
    Row<T, Shape> x, grad;
    x.load(static_cast<const T*>(args.input) + start, width);
    grad.load(static_cast<const T*>(args.grad) + start, width);

    RowRoots roots;
    const RmsStatistics statistics = measure_in_range(x, args, roots, [&](float factor, float share) {
      float sums[2] = {0.0f, 0.0f};
      for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
        float values[N], upstream[N], weight[N];
        x.get(values, slot, offset);
        grad.get(upstream, slot, offset);
        load_parameter<T>(weight, args.gamma, offset);
#pragma unroll
        for (int i = 0; i < N; ++i) upstream[i] *= weight[i] + args.gamma_offset;
        if constexpr (kGated) {
          float gates[N];
          load_floats(gates, gate + offset);
#pragma unroll
          for (int i = 0; i < N; ++i) upstream[i] *= activate(args.activation, gates[i]).value;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float scaled = values[i] * factor;
          sums[0] += scaled * scaled;
          sums[1] += upstream[i] * share * scaled;
        }
      });
      row_sum<Shape>(sums);
      const float count = static_cast<float>(width);
      return RmsStatistics{factor, sums[0] / count, sums[1] / (count * share)};
    });
    const float projection = projection_of(statistics.product, roots.normalise);

    for_each_vector<Shape>(width, [&](int slot, int64_t offset) {
      float values[N], upstream[N], weight[N];
      x.get(values, slot, offset);
      grad.get(upstream, slot, offset);
      load_parameter<T>(weight, args.gamma, offset);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = values[i] * statistics.factor * roots.normalise;
        weight[i] += args.gamma_offset;
      }
      if constexpr (kGated) {
        float gates[N], grad_gate[N];
        load_floats(gates, gate + offset);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const Activation activation = activate(args.activation, gates[i]);
          grad_gate[i] = upstream[i] * values[i] * weight[i] * activation.slope;
          upstream[i] *= activation.value;
        }
        if (args.grad_gate != nullptr) store_floats(static_cast<T*>(args.grad_gate) + start + offset, grad_gate);
      }
      if (gamma_sum.wanted()) {
        float products[N];
#pragma unroll
        for (int i = 0; i < N; ++i) products[i] = upstream[i] * values[i];
        gamma_sum.add(products, slot, offset);
      }
      if (args.grad_input == nullptr) return;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float centred = fmaf(-values[i], projection, upstream[i] * weight[i]);
        upstream[i] = centred * roots.gradient[0] * roots.gradient[1];
      }
      store_grad_input<T>(args, start + offset, upstream);
    });
  }
  gamma_sum.store();
}

}  // namespace rudnn
