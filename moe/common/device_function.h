// For headers of functions that are compiled as CUDA and as Metal, and the basic functions whose names differ there.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
// By default Metal assumes that there is no NaN and no infinity, and reorders and fuses.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define RUDNN_DEVICE inline
using namespace metal;
#else
#include "common/cuda/device.cuh"
#define RUDNN_DEVICE __device__ __forceinline__
#endif

namespace rudnn {

#ifdef __METAL_VERSION__
RUDNN_DEVICE uint float_bits(float x) { return as_type<uint>(x); }
RUDNN_DEVICE float float_from_bits(uint bits) { return as_type<float>(bits); }
RUDNN_DEVICE float square_root(float x) { return metal::precise::sqrt(x); }
RUDNN_DEVICE float exponential(float x) { return metal::precise::exp(x); }
RUDNN_DEVICE float natural_logarithm(float x) { return metal::precise::log(x); }
RUDNN_DEVICE float hyperbolic_tangent(float x) { return metal::precise::tanh(x); }
#else
RUDNN_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
RUDNN_DEVICE float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }
RUDNN_DEVICE float square_root(float x) { return sqrtf(x); }
RUDNN_DEVICE float exponential(float x) { return expf(x); }
RUDNN_DEVICE float natural_logarithm(float x) { return logf(x); }
RUDNN_DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
#endif

// Metal's own function may assume that everything is.
RUDNN_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

}  // namespace rudnn
