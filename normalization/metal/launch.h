// What the launchers of kernels over rows have in common.
#pragma once

#include <cstdint>
#include <string>

#include "common/metal/call.h"
#include "metal/row_plan.h"

namespace rudnn {

// The instance of a kernel for a dtype and a plan, by the name that INSTANCES in its shader gives it.
inline std::string instance_of(const char* kernel, DType dtype, const RowPlan& plan) {
  return std::string(kernel) + "_" + metal::shader_type(dtype) + (plan.vectors ? "_x4" : "_x1") +
         (plan.simdgroup_row ? "_simdgroup" : "_threadgroup");
}

inline void run_rows(const metal::Launch& launch, const RowPlan& plan) {
  launch.run({static_cast<uint32_t>(plan.threadgroups)}, {static_cast<uint32_t>(plan.threads)});
}

}  // namespace rudnn
