// What the kernels of the norms have in common.
#pragma once

#include "cuda/parameter_sums.cuh"
#include "cuda/row.cuh"
#include "ops/norm_statistics.h"

namespace rudnn {

// Pointers to rows of the kernel's T. Those marked optional may be null.
struct NormForwardArgs : NormArgs {
  Parameter gamma;
  const void* input;     // [rows, width]
  const void* residual;  // [rows, width], optional: then x = input + residual, rounded to T
  void* output;          // [rows, width]
  void* sum;             // [rows, width], input + residual; there if residual is
};

struct NormBackwardArgs : NormArgs {
  Parameter gamma;
  const void* grad;       // [rows, width]
  const void* grad_sum;   // [rows, width], optional: added to grad_input
  const void* input;      // [rows, width], what was normalised
  void* grad_input;       // [rows, width], optional
  float* gamma_partials;  // [rows of threads, width], optional
};

// Loads what is normalised of the row that begins at element `start`.
template <class T, class Shape>
__device__ __forceinline__ void load_input(Row<T, Shape>& x, const NormForwardArgs& args, int64_t start) {
  const T* input = static_cast<const T*>(args.input) + start;
  if (args.residual == nullptr) return x.load(input, args.width);
  x.load_sum(input, static_cast<const T*>(args.residual) + start, static_cast<T*>(args.sum) + start, args.width);
}

// Stores the gradient of neighbouring elements of the input, which is wanted.
template <class T, int kVector>
__device__ __forceinline__ void store_grad_input(const NormBackwardArgs& args, int64_t offset,
                                                 float (&values)[kVector]) {
  if (args.grad_sum != nullptr) {
    float more[kVector];
    load_floats(more, static_cast<const T*>(args.grad_sum) + offset);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] += more[i];
  }
  store_floats(static_cast<T*>(args.grad_input) + offset, values);
}

}  // namespace rudnn
