// For headers of functions that are compiled as CUDA and as Metal.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define RUDNN_DEVICE inline
#else
#include "common/cuda/device.cuh"
#define RUDNN_DEVICE __device__ __forceinline__
#endif
