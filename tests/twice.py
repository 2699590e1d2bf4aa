"""A made-up family with CUDA and Metal sources, one operator that doubles, small enough to build in a test."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

BUILD_TOML = """\
[general]
name = "rudnn-twice"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda", "metal"]

[general.hub]
repo-id = "rudnn/rudnn-twice"

[torch]
src = ["common/dtype.h", "ops/twice.cpp", "ops/twice.h", "torch-ext/torch_binding.cpp"]
include = ["."]

[torch.stable-abi]
cpu = "2.11"
cuda = "2.11"

[kernel.twice_cpu]
backend = "cpu"
depends = ["torch"]
include = ["."]
src = ["cpu/twice.cpp", "ops/twice.h"]

[kernel.twice_cuda]
backend = "cuda"
depends = ["torch"]
include = ["."]
src = ["common/cuda/device.cuh", "common/dtype.h", "cuda/twice.cu", "cuda/twice.cuh", "ops/twice.h"]

[kernel.twice_metal]
backend = "metal"
depends = ["torch"]
include = ["."]
src = [
  "common/metal/pipeline.h",
  "metal/pipeline.mm",
  "metal/twice.cpp",
  "metal/twice.metal",
  "metal/two.h",
  "ops/twice.h",
]
"""

OP_HEADER = """\
#pragma once

#if defined(METAL_KERNEL)
#include <ATen/core/Tensor.h>
using Tensor = at::Tensor;
#else
#include <torch/csrc/stable/tensor.h>
using Tensor = torch::stable::Tensor;
#endif

Tensor twice(const Tensor& input);
void launch_twice(const float* input, float* output, long n);
"""

OP = """\
#include "ops/twice.h"

#if defined(METAL_KERNEL)
#include <ATen/ops/empty_like.h>
using at::empty_like;
#else
#include <torch/csrc/stable/ops.h>
using torch::stable::empty_like;
#endif
#if defined(RUDNN_SIMT)
#include <simt/engine/host.h>
#endif

Tensor twice(const Tensor& input) {
  Tensor output = empty_like(input);
#if defined(RUDNN_SIMT)
  simt::BufferScope scope;
  const size_t bytes = input.numel() * sizeof(float);
  simt::register_buffer(input.data_ptr(), bytes, "input", simt::Access::input);
  simt::register_buffer(output.data_ptr(), bytes, "output", simt::Access::output);
#endif
  launch_twice(static_cast<const float*>(input.data_ptr()), static_cast<float*>(output.data_ptr()), input.numel());
#if defined(RUDNN_SIMT)
  simt::check_outputs();
#endif
  return output;
}
"""

BINDING = """\
#include "registration.h"

#include "ops/twice.h"

#if defined(METAL_KERNEL)
#include <torch/library.h>
#define LIBRARY TORCH_LIBRARY_EXPAND
#define LIBRARY_IMPL TORCH_LIBRARY_IMPL_EXPAND
#define BOXED(function) &function
#else
#include <torch/csrc/stable/library.h>
#define LIBRARY STABLE_TORCH_LIBRARY_EXPAND
#define LIBRARY_IMPL STABLE_TORCH_LIBRARY_IMPL_EXPAND
#define BOXED(function) TORCH_BOX(&function)
#endif
#if defined(CUDA_KERNEL) && !defined(RUDNN_SIMT)
#define KEY CUDA
#else
#define KEY CPU
#endif

LIBRARY(TORCH_EXTENSION_NAME, ops) { ops.def("twice(Tensor input) -> Tensor"); }
LIBRARY_IMPL(TORCH_EXTENSION_NAME, KEY, ops) { ops.impl("twice", BOXED(twice)); }
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

CUDA_HEADER = """\
#pragma once

#include "common/cuda/device.cuh"

__global__ void twice_kernel(const float* input, float* output, long n) {
  __shared__ float values[64];
  const unsigned partner = threadIdx.x ^ 32;
  const long i = blockIdx.x * 64 + threadIdx.x, fetched = blockIdx.x * 64 + partner;
  values[partner] = fetched < n ? input[fetched] : 0;
  __syncthreads();
  if (i < n) output[i] = 2 * values[threadIdx.x];
}
"""

CUDA = """\
#include "cuda/twice.cuh"

#include "ops/twice.h"

void launch_twice(const float* input, float* output, long n) {
  const unsigned blocks = static_cast<unsigned>((n + 63) / 64);
  rudnn::launch(twice_kernel, {dim3(blocks), dim3(64)}, input, output, n);
}
"""

METAL_HEADER = """\
#pragma once

constant constexpr float two = 2.0f;
"""

METAL = """\
#include <metal_stdlib>

#include "two.h"

[[kernel]] void twice_float(device const float* input [[buffer(0)]], device float* output [[buffer(1)]],
                            constant long& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < n) output[i] = two * input[i];
}
"""

METAL_LAUNCHER = """\
#include "common/metal/pipeline.h"
#include "ops/twice.h"

void launch_twice(const float* input, float* output, long n) {
  const unsigned groups = static_cast<unsigned>((n + 63) / 64);
  rudnn::metal::Launch("twice_float")
      .buffer(0, {const_cast<float*>(input), 0})
      .buffer(1, {output, 0})
      .bytes(2, n)
      .run({groups}, {64});
}
"""

FILES = {
    "twice/build.toml": BUILD_TOML,
    "twice/ops/twice.h": OP_HEADER,
    "twice/ops/twice.cpp": OP,
    "twice/cpu/twice.cpp": '#include "ops/twice.h"\n'
    "void launch_twice(const float* input, float* output, long n) {\n"
    "  for (long i = 0; i < n; ++i) output[i] = 2 * input[i];\n"
    "}\n",
    "twice/cuda/twice.cuh": CUDA_HEADER,
    "twice/cuda/twice.cu": CUDA,
    "twice/metal/pipeline.mm": "#error only on a Mac\n",
    "twice/metal/two.h": METAL_HEADER,
    "twice/metal/twice.metal": METAL,
    "twice/metal/twice.cpp": METAL_LAUNCHER,
    "twice/torch-ext/torch_binding.cpp": BINDING,
    "twice/torch-ext/rudnn_twice/__init__.py": "from ._ops import ops\n\ntwice = ops.twice\n",
}

# The family has copies of the real headers.
SHARED = ("common/cuda/device.cuh", "common/dtype.h", "common/metal/pipeline.h")
FILES |= {path: (ROOT / path).read_text() for path in SHARED}
