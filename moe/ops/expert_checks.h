// Checks that several ops of the family share.
#pragma once

#include <limits>
#include <optional>

#include "common/check.h"

namespace rudnn {

inline void check_dim(const char* op, const char* argument, const Tensor& tensor, int64_t dim) {
  if (tensor.dim() != dim) {
    fail_check(op, argument,
               "must have " + std::to_string(dim) + " axes, got shape " + describe_shape(shape_of(tensor)));
  }
}

inline void check_float_matrix(const char* op, const char* argument, const Tensor& tensor) {
  check_float(op, argument, tensor);
  check_dim(op, argument, tensor, 2);
}

// The k experts of each token.
inline void check_indices(const char* op, const char* argument, const Tensor& indices, const Tensor& reference) {
  if (indices.scalar_type() != ScalarType::Int && indices.scalar_type() != ScalarType::Long) {
    fail_check(op, argument, std::string("must be int32 or int64, got ") + dtype_name(indices.scalar_type()));
  }
  check_storage(op, argument, indices);
  check_dim(op, argument, indices, 2);
  check_same_device(op, argument, indices, reference);
}

// Maps count rows in int32.
inline void check_row_count(const char* op, const char* argument, const Tensor& indices) {
  if (indices.numel() > std::numeric_limits<int32_t>::max()) {
    fail_check(op, argument, "must have fewer than 2^31 elements, got " + std::to_string(indices.numel()));
  }
}

// Indices count experts in int32.
inline void check_expert_count(const char* op, const char* argument, const Tensor& logits) {
  if (logits.size(1) > std::numeric_limits<int32_t>::max()) {
    fail_check(op, argument, "must have fewer than 2^31 experts, got " + std::to_string(logits.size(1)));
  }
}

// One of the maps that dispatch makes.
inline void check_map(const char* op, const char* argument, const Tensor& map, const std::vector<int64_t>& shape,
                      const Tensor& reference) {
  check_dtype(op, argument, map, ScalarType::Int);
  check_shape(op, argument, map, shape);
  check_same_device(op, argument, map, reference);
}

inline void check_at_least(const char* op, const char* argument, int64_t value, int64_t least) {
  if (value < least) {
    fail_check(op, argument, "must be at least " + std::to_string(least) + ", got " + std::to_string(value));
  }
}

inline void check_at_most(const char* op, const char* argument, int64_t value, int64_t most) {
  check_at_least(op, argument, value, 1);
  if (value > most) {
    fail_check(op, argument, "must be at most " + std::to_string(most) + ", got " + std::to_string(value));
  }
}

}  // namespace rudnn
