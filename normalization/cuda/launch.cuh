// What the launchers of the norms have in common.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "common/cuda/call.h"
#include "cuda/parameter_sums.cuh"
#include "cuda/row_plan.cuh"

namespace rudnn {

inline Parameter parameter(const char* name, const Tensor* tensor) {
  return {cuda::input_data(name, tensor), tensor != nullptr && dtype_of(*tensor) == DType::kFloat32};
}

// Calls visit(TypeTag<T>, RowShape) for the dtype of `rows` and the plan.
template <class Budget, class Visit>
void visit_rows(DType dtype, const RowPlan& plan, Visit&& visit) {
  visit_dtype(dtype, [&](auto type) {
    visit_row_shape<typename decltype(type)::type, Budget>(plan, [&](auto shape) { visit(type, shape); });
  });
}

template <class Args>
void launch_rows(void (*kernel)(Args), const RowPlan& plan, Stream stream, const Args& args) {
  if (plan.blocks == 0) return;
  const int block = plan.threads == kWarpSize ? kWarpsPerBlock * kWarpSize : plan.threads;
  launch(kernel, {dim3(static_cast<unsigned>(plan.blocks)), dim3(static_cast<unsigned>(block)), 0, stream}, args);
}

// The sums of a parameter's gradient that the rows of threads of a plan leave. Without a gradient to compute there are
// none, and nothing is done.
class Partials {
 public:
  Partials(const char* name, const Tensor* gradient, const Tensor& rows, const RowPlan& plan, int64_t width)
      : name_(name), gradient_(gradient) {
    if (gradient_ == nullptr) return;
    partials_ = new_empty(rows, {rows_of_threads(plan), width}, ScalarType::Float);
    data_ = static_cast<float*>(cuda::scratch_data("partial sums", &*partials_));
  }

  float* data() const { return data_; }

  void sum(Stream stream) const {
    if (gradient_ == nullptr) return;
    constexpr int kColumns = 32, kShares = 8;
    const int64_t width = partials_->size(1);
    const dim3 grid(static_cast<unsigned>((width + kColumns - 1) / kColumns));
    launch(sum_partials<kColumns, kShares>, {grid, dim3(kColumns, kShares), 0, stream}, data_, partials_->size(0),
           width, static_cast<float*>(cuda::output_data(name_, gradient_)));
  }

 private:
  const char* name_;
  const Tensor* gradient_;
  std::optional<Tensor> partials_;
  float* data_ = nullptr;
};

}  // namespace rudnn
