// What launchers of several families have in common.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/metal/call.h"
#include "common/metal/element_type.h"

namespace rudnn {

static_assert(static_cast<int>(DType::kFloat32) == kFloatElements &&
                  static_cast<int>(DType::kFloat16) == kHalfElements &&
                  static_cast<int>(DType::kBFloat16) == kBfloatElements,
              "shaders number the element types as DType does");

inline int32_t element_type(const Tensor& tensor) { return static_cast<int32_t>(dtype_of(tensor)); }

// Threadgroups along an axis of a grid, of which each has `size` of `count`.
inline uint32_t groups_of(int64_t count, int64_t size) {
  const int64_t groups = (count + size - 1) / size;
  if (groups > INT32_MAX) throw std::runtime_error("a grid of " + std::to_string(groups) + " groups is too large");
  return static_cast<uint32_t>(groups);
}

// The instance of a kernel for a dtype, by the name that its shader gives it.
inline std::string instance_of(const std::string& kernel, DType dtype) {
  return kernel + "_" + metal::shader_type(dtype);
}

// What a result is where there is nothing to compute it from. No kernel could have it: empty tensors have no buffer to
// bind.
inline void zero(const Tensor& result) { result.zero_(); }

// Whether rows of so many elements are multiples of 16 bytes, and so start where is_aligned wants them.
inline bool has_aligned_rows(int64_t width, DType dtype) {
  return width * (dtype == DType::kFloat32 ? 4 : 2) % 16 == 0;
}

// A tensor that lives as long as the launch, with its memory.
struct Scratch {
  Tensor tensor;
  metal::Memory memory;

  Scratch(const char* name, const Tensor& like, const std::vector<int64_t>& shape, ScalarType type)
      : tensor(new_empty(like, shape, type)), memory(metal::scratch_data(name, &tensor)) {}
};

}  // namespace rudnn
