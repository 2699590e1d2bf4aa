// What the launchers of the norms have in common.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "common/metal/call.h"
#include "metal/parameter_sums_args.h"
#include "metal/row_plan.h"

namespace rudnn {

inline bool is_float32(const Tensor* tensor) { return tensor != nullptr && dtype_of(*tensor) == DType::kFloat32; }

// The instance of a kernel for a dtype and a plan, by the name that INSTANCES in its shader gives it.
inline std::string instance_of(const char* kernel, DType dtype, const RowPlan& plan) {
  return std::string(kernel) + "_" + metal::shader_type(dtype) + (plan.vectors ? "_x4" : "_x1") +
         (plan.simdgroup_row ? "_simdgroup" : "_threadgroup");
}

inline void run_rows(const metal::Launch& launch, const RowPlan& plan) {
  launch.run({static_cast<uint32_t>(plan.threadgroups)}, {static_cast<uint32_t>(plan.threads)});
}

// The gradient of a parameter where there are no rows. No kernel could have it: an empty tensor has no buffer to bind.
inline void zero(const Tensor* gradient) {
  if (gradient != nullptr) gradient->zero_();
}

// The sums of a parameter's gradient that the teams of a plan leave. Without a gradient to compute there are none, and
// nothing is done.
class Partials {
 public:
  Partials(const char* name, const Tensor* gradient, const Tensor& rows, const RowPlan& plan, int64_t width)
      : name_(name), gradient_(gradient), args_{teams(plan), width} {
    if (gradient_ == nullptr) return;
    partials_ = new_empty(rows, {args_.count, width}, ScalarType::Float);
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

}  // namespace rudnn
