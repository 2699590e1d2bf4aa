// What memory safety asks of the arguments of a registered op, so that even a direct call with wrong tensors raises.
// A public function comes here first too, and words the refusal in its family's own exception when one of these raises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/tensor.h"

namespace rudnn {

[[noreturn]] inline void fail_check(const char* op, const char* argument, const std::string& problem) {
  throw std::runtime_error(std::string(op) + ": " + argument + " " + problem);
}

inline std::string describe_shape(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << '(';
  for (size_t axis = 0; axis < shape.size(); ++axis) text << (axis ? ", " : "") << shape[axis];
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

inline bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

// A parameter that is sharded or offloaded keeps its shape while its storage is freed.
inline void check_storage(const char* op, const char* argument, const Tensor& tensor) {
  const int64_t extent = extent_of(tensor);
  if (extent == 0) return;
  const int64_t end = (tensor.storage_offset() + extent) * static_cast<int64_t>(tensor.element_size());
  if (end > storage_bytes(tensor)) {
    fail_check(op, argument,
               "must have memory for all its elements, but its storage has " + std::to_string(storage_bytes(tensor)) +
                   " of " + std::to_string(end) + " bytes");
  }
}

inline void check_float(const char* op, const char* argument, const Tensor& tensor) {
  if (!is_float(tensor.scalar_type())) {
    fail_check(op, argument,
               std::string("must be float32, float16 or bfloat16, got ") + dtype_name(tensor.scalar_type()));
  }
  check_storage(op, argument, tensor);
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor, ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    fail_check(op, argument,
               std::string("must be ") + dtype_name(expected) + ", got " + dtype_name(tensor.scalar_type()));
  }
  check_storage(op, argument, tensor);
}

// float32, or the dtype of `reference`.
inline void check_float32_or_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  const bool is_float32 = tensor.scalar_type() == ScalarType::Float;
  check_dtype(op, argument, tensor, is_float32 ? ScalarType::Float : reference.scalar_type());
}

inline void check_shape(const char* op, const char* argument, const Tensor& tensor,
                        const std::vector<int64_t>& expected) {
  const std::vector<int64_t> shape = shape_of(tensor);
  if (shape != expected) {
    fail_check(op, argument, "must have shape " + describe_shape(expected) + ", got " + describe_shape(shape));
  }
}

inline std::string describe_device(const Tensor& tensor) {
  const auto device = tensor.device();
  std::ostringstream text;
  text << "type " << static_cast<int>(device.type()) << " index " << static_cast<int>(device.index());
  return text.str();
}

// `reference` is the argument whose device the others share.
inline void check_same_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  if (tensor.device() != reference.device()) {
    fail_check(op, argument, "must be on device " + describe_device(reference) + ", got " + describe_device(tensor));
  }
}

// A tensor that goes with `reference` element by element: same shape, dtype and device.
inline void check_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  check_dtype(op, argument, tensor, reference.scalar_type());
  check_shape(op, argument, tensor, shape_of(reference));
  check_same_device(op, argument, tensor, reference);
}

}  // namespace rudnn
