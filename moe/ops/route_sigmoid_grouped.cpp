#include "ops/route_sigmoid_grouped.h"

#include <algorithm>
#include <tuple>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {

std::tuple<Tensor, Tensor> route_sigmoid_grouped(const Tensor& logits, const std::optional<Tensor>& bias, int64_t top_k,
                                                 int64_t groups, int64_t selected_groups, bool group_top_two,
                                                 bool renormalize, double scale) {
  constexpr const char* kOp = "route_sigmoid_grouped";
  check_float_matrix(kOp, "logits", logits);
  const int64_t experts = logits.size(1);
  check_at_most(kOp, "logits' experts", experts, kMostGroupedExperts);
  check_at_most(kOp, "groups", groups, kMostGroups);
  if (experts % groups != 0) fail_check(kOp, "groups", "must divide the experts, got " + std::to_string(groups));
  check_at_most(kOp, "selected_groups", selected_groups, groups);
  check_at_most(kOp, "top_k", top_k, std::min<int64_t>(kMostGroupedTopK, selected_groups * (experts / groups)));
  if (group_top_two) check_at_least(kOp, "the size of a group", experts / groups, 2);
  if (bias) {
    check_dtype(kOp, "bias", *bias, ScalarType::Float);
    check_shape(kOp, "bias", *bias, {experts});
    check_same_device(kOp, "bias", *bias, logits);
  }
  const Tensor rows = as_contiguous(logits);
  const std::optional<Tensor> biases = as_contiguous(bias);
  const Tensor indices = new_empty(rows, {rows.size(0), top_k}, ScalarType::Int);
  const Tensor weights = new_empty(rows, {rows.size(0), top_k}, rows.scalar_type());
  RouteSigmoidGroupedCall call;
  call.logits = &rows;
  call.bias = pointer_to(biases);
  call.top_k = top_k;
  call.groups = groups;
  call.selected_groups = selected_groups;
  call.group_top_two = group_top_two;
  call.renormalize = renormalize;
  call.scale = static_cast<float>(scale);
  call.indices = &indices;
  call.weights = &weights;
  if (rows.size(0) > 0) launch_route_sigmoid_grouped(call);
  return {indices, weights};
}

}  // namespace rudnn
