// What the launchers of kernels over rows have in common.
#pragma once

#include "common/cuda/call.h"
#include "cuda/row_plan.cuh"

namespace rudnn {

// Calls visit(TypeTag<T>, RowShape) for the dtype of the rows and their plan.
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
  launch(kernel, {blocks_of(plan.blocks), blocks_of(block), 0, stream}, args);
}

}  // namespace rudnn
