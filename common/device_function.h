// For headers of functions that are compiled as CUDA and as Metal.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
// By default Metal assumes that there is no NaN and no infinity, and reorders and fuses.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define RUDNN_DEVICE inline
#else
#include "common/cuda/device.cuh"
#define RUDNN_DEVICE __device__ __forceinline__
#endif
