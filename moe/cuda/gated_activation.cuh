// silu_and_mul, gelu_and_mul, gelu_tanh_and_mul: the activation of a row's first half times its second half.
#pragma once

#include "cuda/arguments.cuh"
#include "ops/activation_math.h"

namespace rudnn {

struct GatedActivationArgs {
  int64_t rows;
  int64_t width;  // of the output; a row of the input has twice as many elements
  const void* input;
  void* output;
  const void* grad;  // in the backward
  void* grad_input;
};

template <class T, int kVector, Activation kActivation>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) gated_activation(GatedActivationArgs args) {
  const Piece<kVector> piece(args.rows, args.width);
  const T* gate = static_cast<const T*>(args.input) + piece.row() * 2 * args.width;
  T* output = static_cast<T*>(args.output) + piece.row() * args.width;
  piece.for_each_vector([&](int, int64_t offset) {
    float values[kVector], factors[kVector];
    load_floats(values, gate + offset);
    load_floats(factors, gate + args.width + offset);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = activate(kActivation, values[i]) * factors[i];
    store_floats(output + offset, values);
  });
}

template <class T, int kVector, Activation kActivation>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) gated_activation_backward(GatedActivationArgs args) {
  const Piece<kVector> piece(args.rows, args.width);
  const T* gate = static_cast<const T*>(args.input) + piece.row() * 2 * args.width;
  const T* grad = static_cast<const T*>(args.grad) + piece.row() * args.width;
  T* grad_gate = static_cast<T*>(args.grad_input) + piece.row() * 2 * args.width;
  piece.for_each_vector([&](int, int64_t offset) {
    float values[kVector], factors[kVector], grads[kVector];
    load_floats(values, gate + offset);
    load_floats(factors, gate + args.width + offset);
    load_floats(grads, grad + offset);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Activated activated = activate_with_slope(kActivation, values[i]);
      values[i] = grads[i] * factors[i] * activated.slope;
      factors[i] = grads[i] * activated.value;
    }
    store_floats(grad_gate + offset, values);
    store_floats(grad_gate + args.width + offset, factors);
  });
}

}  // namespace rudnn
