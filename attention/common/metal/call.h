// What a launcher needs around its kernels: the memory of its tensors, for Launch::buffer. On the bench the engine is
// told what each tensor stands for.
#pragma once

#include "common/metal/pipeline.h"
#include "common/tensor.h"

#ifdef RUDNN_SIMT
#include <simt/engine/host.h>
#endif

namespace rudnn::metal {

// Of a tensor on MPS the storage is an id<MTLBuffer>, on the bench an address.
inline Memory memory_of(const Tensor& tensor) {
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  return {const_cast<void*>(tensor.storage().data()), offset};
}

#ifdef RUDNN_SIMT
inline Memory describe(const char* name, const Tensor& tensor, simt::Access access) {
  simt::register_tensor(tensor, name, access);
  return memory_of(tensor);
}
#define RUDNN_DESCRIBE(name, tensor, access) describe(name, tensor, simt::Access::access)
#else
#define RUDNN_DESCRIBE(name, tensor, access) (static_cast<void>(name), memory_of(tensor))
#endif

// The memory of a tensor that kernels only read, of one that they write as a whole, and of one that they may leave
// partly unwritten. None for null. `name` is what the bench calls it.
inline Memory input_data(const char* name, const Tensor* tensor) {
  return tensor != nullptr ? RUDNN_DESCRIBE(name, *tensor, input) : Memory{};
}
inline Memory output_data(const char* name, const Tensor* tensor) {
  return tensor != nullptr ? RUDNN_DESCRIBE(name, *tensor, output) : Memory{};
}
inline Memory scratch_data(const char* name, const Tensor* tensor) {
  return tensor != nullptr ? RUDNN_DESCRIBE(name, *tensor, scratch) : Memory{};
}

#undef RUDNN_DESCRIBE

// A dtype's name in shaders.
inline const char* shader_type(DType dtype) {
  return dtype == DType::kFloat32 ? "float" : dtype == DType::kFloat16 ? "half" : "bfloat";
}

// Runs `call()`, which asks for the memory of its tensors and launches. On the bench this happens once for each order
// of threads that is asked for, and the bits must be the same.
template <class Call>
void run_on_device(const Call& call) {
#ifdef RUDNN_SIMT
  simt::run_in_each_order(call);
#else
  call();
#endif
}

}  // namespace rudnn::metal
