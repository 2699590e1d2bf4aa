// What a launcher needs around its kernels: pointers for them, the device of the tensors and its stream. On the bench
// the engine is told what each pointer stands for.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/cuda/device.cuh"
#include "common/tensor.h"

#ifdef RUDNN_SIMT
#include <simt/engine/host.h>
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace rudnn {

inline int64_t ceil_divide(int64_t count, int64_t by) { return (count + by - 1) / by; }

// Whether rows of this width can be moved 16 bytes at a time.
inline bool is_whole_vectors(int64_t width, int64_t element_bytes) { return width * element_bytes % 16 == 0; }

// Blocks along the first axis of a grid.
inline dim3 blocks_of(int64_t count) {
  if (count > INT32_MAX) throw std::runtime_error("a grid of " + std::to_string(count) + " blocks is too large");
  return dim3(static_cast<unsigned>(count));
}

namespace cuda {

#ifdef RUDNN_SIMT
#define RUDNN_DESCRIBE(name, tensor, access) simt::register_tensor(tensor, name, simt::Access::access)
#else
#define RUDNN_DESCRIBE(name, tensor, access) static_cast<void>(name)
#endif

// The data of a tensor that kernels only read, of one that they write as a whole, and of one that they may leave partly
// unwritten. Null for null. `name` is what the bench calls it.
inline const void* input_data(const char* name, const Tensor* tensor) {
  if (tensor == nullptr) return nullptr;
  RUDNN_DESCRIBE(name, *tensor, input);
  return tensor->const_data_ptr();
}
inline void* output_data(const char* name, const Tensor* tensor) {
  if (tensor == nullptr) return nullptr;
  RUDNN_DESCRIBE(name, *tensor, output);
  return tensor->mutable_data_ptr();
}
inline void* scratch_data(const char* name, const Tensor* tensor) {
  if (tensor == nullptr) return nullptr;
  RUDNN_DESCRIBE(name, *tensor, scratch);
  return tensor->mutable_data_ptr();
}

#undef RUDNN_DESCRIBE

// Runs `call(stream)`, which asks for the data of its tensors and launches, with the device of `tensor` and its current
// stream. On the bench this happens once for each order of threads that is asked for, and the bits must be the same.
template <class Call>
void run_on_device(const Tensor& tensor, const Call& call) {
#ifdef RUDNN_SIMT
  static_cast<void>(tensor);
  simt::run_in_each_order([&] { call(Stream{}); });
#else
  const int32_t device = tensor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  call(static_cast<Stream>(stream));
#endif
}

}  // namespace cuda
}  // namespace rudnn
