// What the launchers of the norms have in common.
#pragma once

#include <cstdint>
#include <optional>

#include "metal/launch.h"
#include "metal/norm_args.h"
#include "metal/parameter_sums_args.h"

namespace rudnn {

inline bool is_float32(const Tensor* tensor) { return tensor != nullptr && dtype_of(*tensor) == DType::kFloat32; }

// The gradient of a parameter where there are no rows. No kernel could have it: an empty tensor has no buffer to bind.
inline void zero(const Tensor* gradient) {
  if (gradient != nullptr) gradient->zero_();
}

// The sums of a parameter's gradient that the teams of a plan leave. Without a gradient to compute there are none, and
// nothing is done.
class Partials {
 public:
  Partials(const char* name, const Tensor* gradient, const RowPlan& plan) : name_(name), gradient_(gradient) {
    if (gradient_ == nullptr) return;
    args_ = {plan.threadgroups * rows_per_threadgroup(plan), gradient_->numel()};
    partials_ = new_empty(*gradient_, {args_.count, args_.width}, ScalarType::Float);
    memory_ = metal::scratch_data("partial sums", &*partials_);
  }

  const metal::Memory& memory() const { return memory_; }

  void sum() const {
    if (gradient_ == nullptr) return;
    metal::Launch("sum_partials")
        .bytes(kSumsArgsBuffer, args_)
        .buffer(kPartialsBuffer, memory_)
        .buffer(kSumsBuffer, metal::output_data(name_, gradient_))
        .run({static_cast<uint32_t>((args_.width + kSumColumns - 1) / kSumColumns)}, {kSumColumns, kSumShares});
  }

 private:
  const char* name_;
  const Tensor* gradient_;
  ParameterSumsArgs args_;
  std::optional<Tensor> partials_;
  metal::Memory memory_;
};

template <class Call>
RowPlan plan_forward(const Call& call) {
  const NormArgs args = norm_args(call);
  return plan_rows(args.rows, args.width, kForwardBudget);
}

// Of a norm's backward, which is `summed` if the gradient of a parameter is wanted.
template <class Call>
RowPlan plan_backward(const Call& call, bool summed) {
  const NormArgs args = norm_args(call);
  return plan_rows(summed ? rows_to_sum(args.rows) : args.rows, args.width, kBackwardBudget);
}

// Launches with what kernels of every norm are given.

template <class Call>
metal::Launch forward_launch(const char* kernel, const Call& call, const RowPlan& plan) {
  metal::Launch launch(instance_of(kernel, dtype_of(*call.input), plan));
  launch.constant(kGammaIsFloatConstant, is_float32(call.gamma))
      .constant(kAddsResidualConstant, call.residual != nullptr)
      .bytes(kArgsBuffer, norm_args(call))
      .buffer(kGammaBuffer, metal::input_data("gamma", call.gamma))
      .buffer(kInputBuffer, metal::input_data("input", call.input))
      .buffer(kResidualBuffer, metal::input_data("residual", call.residual))
      .buffer(kOutputBuffer, metal::output_data("output", call.output))
      .buffer(kSumBuffer, metal::output_data("sum", call.sum));
  return launch;
}

template <class Call>
metal::Launch backward_launch(const char* kernel, const Call& call, const RowPlan& plan,
                              const Partials& gamma_partials) {
  metal::Launch launch(instance_of(kernel, dtype_of(*call.input), plan));
  launch.constant(kGammaIsFloatConstant, is_float32(call.gamma))
      .constant(kAddsGradSumConstant, call.grad_sum != nullptr)
      .constant(kWantsInputConstant, call.grad_input != nullptr)
      .constant(kWantsGammaConstant, call.grad_gamma != nullptr)
      .bytes(kArgsBuffer, norm_args(call))
      .buffer(kGammaBuffer, metal::input_data("gamma", call.gamma))
      .buffer(kGradBuffer, metal::input_data("grad", call.grad))
      .buffer(kGradSumBuffer, metal::input_data("grad_sum", call.grad_sum))
      .buffer(kInputBuffer, metal::input_data("input", call.input))
      .buffer(kGradInputBuffer, metal::output_data("grad_input", call.grad_input))
      .buffer(kGammaPartialsBuffer, gamma_partials.memory());
  return launch;
}

}  // namespace rudnn
