// What the launchers of the family have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/metal/call.h"
#include "metal/element_type.h"

namespace rudnn {

static_assert(static_cast<int>(DType::kFloat32) == kFloatElements &&
                  static_cast<int>(DType::kFloat16) == kHalfElements &&
                  static_cast<int>(DType::kBFloat16) == kBfloatElements,
              "shaders number the element types as DType does");

inline int32_t element_type(const Tensor& tensor) { return static_cast<int32_t>(dtype_of(tensor)); }

inline bool is_long(const Tensor& indices) { return indices.scalar_type() == ScalarType::Long; }

inline uint32_t groups_of(int64_t count, int64_t size) { return static_cast<uint32_t>((count + size - 1) / size); }

// The instance of a kernel for a dtype, by the name that its shader gives it.
inline std::string instance_of(const char* kernel, DType dtype) {
  return std::string(kernel) + "_" + metal::shader_type(dtype);
}

// What a result is where there is nothing to compute it from. No kernel could have it: empty tensors have no buffer to
// bind.
inline void zero(const Tensor& result) { result.zero_(); }

// Whether rows of so many elements are multiples of 16 bytes, and so start where is_aligned wants them.
inline bool has_aligned_rows(int64_t width, DType dtype) {
  return width * (dtype == DType::kFloat32 ? 4 : 2) % 16 == 0;
}

// How the elements of a matrix [rows, width] are shared out among threads: a thread has a vector of 4 or an element of
// each `threads.y * groups.y`-th row.
struct MatrixPlan {
  const char* suffix;  // of the kernel's name
  metal::Size groups, threads;
};

inline MatrixPlan plan_matrix(int64_t rows, int64_t width, bool vectors) {
  constexpr int64_t kThreads = 256, kMostGroups = 65535;
  const int64_t columns = vectors ? width / 4 : width;
  int64_t across = 1;
  while (across < columns && across < kThreads) across *= 2;
  const int64_t down = kThreads / across;
  MatrixPlan plan;
  plan.suffix = vectors ? "_x4" : "_x1";
  plan.threads = {static_cast<uint32_t>(across), static_cast<uint32_t>(down)};
  plan.groups = {groups_of(columns, across), groups_of(std::min(rows, kMostGroups * down), down)};
  return plan;
}

}  // namespace rudnn
