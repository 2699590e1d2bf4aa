#include "cpu/selected_router.h"

#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/parallel.h"
#include "cpu/tensor_indices.h"
#include "ops/selected_router.h"

namespace rudnn {
namespace {

// What an element costs beside one that is only copied.
constexpr int64_t kElementCost = 4;

SelectedRouterArgs args_of(const SelectedRouterCall& call) {
  SelectedRouterArgs args;
  args.dtype = dtype_of(*call.logits);
  args.experts = call.logits->size(1);
  args.top_k = call.indices->size(1);
  args.scoring = call.scoring;
  args.renormalize = call.renormalize;
  args.scale = call.scale;
  args.logits = call.logits->const_data_ptr();
  args.indices = indices_of(*call.indices);
  args.weights = static_cast<float*>(mutable_data_or_null(call.weights));
  args.grad_weights = static_cast<const float*>(const_data_or_null(call.grad_weights));
  args.grad_logits = mutable_data_or_null(call.grad_logits);
  return args;
}

}  // namespace

void launch_selected_router_weights(const SelectedRouterCall& call) {
  static const auto rows = RUDNN_CHOOSE(selected_router_rows);
  const SelectedRouterArgs args = args_of(call);
  cpu::parallel_for(call.logits->size(0), kElementCost * args.experts,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void launch_selected_router_backward(const SelectedRouterCall& call) {
  static const auto rows = RUDNN_CHOOSE(selected_router_backward_rows);
  const SelectedRouterArgs args = args_of(call);
  cpu::parallel_for(call.logits->size(0), kElementCost * args.experts, [&](int64_t begin, int64_t end) {
    std::vector<float> grad_scores(args.experts);
    rows(args, begin, end, grad_scores.data());
  });
}

}  // namespace rudnn
