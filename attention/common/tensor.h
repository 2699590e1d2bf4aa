// One name for the tensor type of the two ABIs that a build can target: PyTorch's stable ABI (CPU, CUDA) and its full
// C++ API (Metal, where no stable command queue exists). Only this file, torch_binding.cpp and what is Metal's alone
// know which one is in use.
#pragma once

#if defined(METAL_KERNEL)
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#else
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#endif

#include <cstdint>
#include <optional>
#include <vector>

#include "common/dtype.h"

namespace rudnn {

#if defined(METAL_KERNEL)

using Tensor = at::Tensor;
using ScalarType = c10::ScalarType;

inline const char* dtype_name(ScalarType type) { return c10::toString(type); }

inline Tensor contiguous_copy(const Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type) {
  return at::empty(shape, like.options().dtype(type));
}

inline Tensor new_empty_like(const Tensor& like) { return at::empty(like.sizes(), like.options()); }

inline Tensor narrow(const Tensor& tensor, int64_t axis, int64_t start, int64_t length) {
  return tensor.narrow(axis, start, length);
}

inline int64_t storage_bytes(const Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

#else

using Tensor = torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;

inline const char* dtype_name(ScalarType type) { return torch::headeronly::toString(type); }

// Of a tensor that is contiguous already, `contiguous` makes no copy.
inline Tensor contiguous_copy(const Tensor& tensor) {
  return tensor.is_contiguous() ? torch::stable::clone(tensor) : torch::stable::contiguous(tensor);
}

// A contiguous, uninitialised tensor on the device of `like`.
inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

// A contiguous, uninitialised tensor of the shape, dtype and device of `like`.
inline Tensor new_empty_like(const Tensor& like) { return torch::stable::new_empty(like, like.sizes()); }

// A view of `length` positions of an axis.
inline Tensor narrow(Tensor tensor, int64_t axis, int64_t start, int64_t length) {
  return torch::stable::narrow(tensor, axis, start, length);
}

// The size of the storage that a tensor is a view of.
inline int64_t storage_bytes(const Tensor& tensor) {
  int64_t bytes = 0;
  return aoti_torch_get_storage_size(tensor.get(), &bytes) == AOTI_TORCH_SUCCESS ? bytes : 0;
}

#endif

// Elements from the first to the last, with those between that a view leaves out.
inline int64_t extent_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t extent = 1;
  for (size_t axis = 0; axis < sizes.size(); ++axis) extent += (sizes[axis] - 1) * strides[axis];
  return extent;
}

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// GPU kernels move up to 16 bytes at a time where rows are multiples of that (on Metal four elements, so 8 bytes too),
// and share them out accordingly. So that a view into the middle of a storage gives the same bits as its copy, such
// rows must start where those of fresh tensors do.
inline bool is_aligned(const Tensor& tensor) {
#if defined(CPU_KERNEL)
  static_cast<void>(tensor);
  return true;
#else
  if (tensor.dim() > 0 && tensor.size(-1) * tensor.element_size() % 8 != 0) return true;
#if defined(METAL_KERNEL) && !defined(RUDNN_SIMT)
  return tensor.storage_offset() * tensor.element_size() % 16 == 0;  // in a buffer that starts on a page
#else
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
#endif
#endif
}

// The tensor itself if it is contiguous and aligned, else a copy that is.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() && is_aligned(tensor) ? tensor : contiguous_copy(tensor);
}

// The same for arguments that may be missing.
inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(as_contiguous(*tensor)) : std::nullopt;
}

inline const Tensor* pointer_to(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// The data of an argument that may be missing.
inline const void* const_data_or_null(const Tensor* tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

inline void* mutable_data_or_null(const Tensor* tensor) { return tensor ? tensor->mutable_data_ptr() : nullptr; }

// The dtype of a tensor that check_float has accepted.
inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

}  // namespace rudnn
