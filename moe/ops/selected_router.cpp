#include "ops/selected_router.h"

#include <algorithm>

#include "ops/expert_checks.h"
#include "torch-ext/torch_binding.h"

namespace rudnn {
namespace {

RouterScoring scoring_named(const char* op, const std::string& name) {
  if (name == "softmax") return RouterScoring::kSoftmax;
  if (name == "sigmoid") return RouterScoring::kSigmoid;
  fail_check(op, "scoring", "must be softmax or sigmoid, got " + name);
}

void check_selection(const char* op, const Tensor& logits, const Tensor& indices) {
  check_float_matrix(op, "logits", logits);
  check_expert_count(op, "logits", logits);
  check_indices(op, "indices", indices, logits);
  check_at_most(op, "the experts of a token", indices.size(1), std::min<int64_t>(kMostSelected, logits.size(1)));
  check_shape(op, "indices", indices, {logits.size(0), indices.size(1)});
}

}  // namespace

Tensor selected_router_weights(const Tensor& logits, const Tensor& indices, const std::string& scoring,
                               bool renormalize, double scale) {
  constexpr const char* kOp = "selected_router_weights";
  check_selection(kOp, logits, indices);
  const Tensor rows = as_contiguous(logits);
  const Tensor chosen = as_contiguous(indices);
  const Tensor weights = new_empty(rows, shape_of(chosen), ScalarType::Float);
  SelectedRouterCall call;
  call.logits = &rows;
  call.indices = &chosen;
  call.scoring = scoring_named(kOp, scoring);
  call.renormalize = renormalize;
  call.scale = static_cast<float>(scale);
  call.weights = &weights;
  if (rows.size(0) > 0) launch_selected_router_weights(call);
  return weights;
}

Tensor selected_router_backward(const Tensor& logits, const Tensor& indices, const Tensor& grad_weights,
                                const std::string& scoring, bool renormalize, double scale) {
  constexpr const char* kOp = "selected_router_backward";
  check_selection(kOp, logits, indices);
  check_dtype(kOp, "grad_weights", grad_weights, ScalarType::Float);
  check_shape(kOp, "grad_weights", grad_weights, shape_of(indices));
  check_same_device(kOp, "grad_weights", grad_weights, logits);
  const Tensor rows = as_contiguous(logits);
  const Tensor chosen = as_contiguous(indices);
  const Tensor grads = as_contiguous(grad_weights);
  const Tensor grad_logits = new_empty_like(rows);
  SelectedRouterCall call;
  call.logits = &rows;
  call.indices = &chosen;
  call.scoring = scoring_named(kOp, scoring);
  call.renormalize = renormalize;
  call.scale = static_cast<float>(scale);
  call.grad_weights = &grads;
  call.grad_logits = &grad_logits;
  if (rows.size(0) > 0) launch_selected_router_backward(call);
  return grad_logits;
}

}  // namespace rudnn
