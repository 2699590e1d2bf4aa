// What the launchers of the norms have in common.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/launch.cuh"
#include "cuda/norm.cuh"

namespace rudnn {

inline Parameter parameter(const char* name, const Tensor* tensor) {
  return {cuda::input_data(name, tensor), tensor != nullptr && dtype_of(*tensor) == DType::kFloat32};
}

// Of a norm's backward, which is `summed` if the gradient of a parameter is wanted.
template <class Call>
RowPlan plan_backward(const Call& call, bool summed) {
  const NormArgs args = norm_args(call);
  return plan_rows<BackwardBudget>(summed ? rows_to_sum(args.rows) : args.rows, args.width, call.input->element_size());
}

// The sums of a parameter's gradient that the rows of threads of a plan leave. Without a gradient to compute there are
// none, and nothing is done.
class Partials {
 public:
  Partials(const char* name, const Tensor* gradient, const RowPlan& plan) : name_(name), gradient_(gradient) {
    if (gradient_ == nullptr) return;
    const int64_t count = plan.blocks * rows_per_block(plan);
    partials_ = new_empty(*gradient_, {count, gradient_->numel()}, ScalarType::Float);
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

// What calls of every norm give to its kernels.

template <class Call>
NormForwardArgs forward_args(const Call& call) {
  return {norm_args(call),
          parameter("gamma", call.gamma),
          cuda::input_data("input", call.input),
          cuda::input_data("residual", call.residual),
          cuda::output_data("output", call.output),
          cuda::output_data("sum", call.sum)};
}

template <class Call>
NormBackwardArgs backward_args(const Call& call, const Partials& gamma_partials) {
  return {norm_args(call),
          parameter("gamma", call.gamma),
          cuda::input_data("grad", call.grad),
          cuda::input_data("grad_sum", call.grad_sum),
          cuda::input_data("input", call.input),
          cuda::output_data("grad_input", call.grad_input),
          gamma_partials.data()};
}

}  // namespace rudnn
