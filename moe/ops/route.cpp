#include "ops/route.h"

#include <tuple>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {

std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, bool renormalize) {
  check_float_matrix("route", "logits", logits);
  check_expert_count("route", "logits", logits);
  check_at_most("route", "top_k", top_k, logits.size(1));
  const Tensor rows = as_contiguous(logits);
  const Tensor indices = new_empty(rows, {rows.size(0), top_k}, ScalarType::Int);
  const Tensor weights = new_empty(rows, {rows.size(0), top_k}, rows.scalar_type());
  RouteCall call;
  call.logits = &rows;
  call.top_k = top_k;
  call.renormalize = renormalize;
  call.indices = &indices;
  call.weights = &weights;
  if (rows.size(0) > 0) launch_route(call);
  return {indices, weights};
}

}  // namespace rudnn
