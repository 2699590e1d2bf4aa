#include "cuda/launch.cuh"
#include "cuda/route.cuh"
#include "ops/route.h"

namespace rudnn {
namespace {

// Calls visit with the number of experts that each lane holds: a few sizes serve all, and long rows are read again.
template <class Visit>
void visit_held(int64_t experts, Visit&& visit) {
  if (experts <= 2 * kWarpSize) return visit(std::integral_constant<int, 2>{});
  if (experts <= 8 * kWarpSize) return visit(std::integral_constant<int, 8>{});
  if (experts <= 32 * kWarpSize) return visit(std::integral_constant<int, 32>{});
  visit(std::integral_constant<int, 0>{});
}

}  // namespace

void launch_route(const RouteCall& call) {
  cuda::run_on_device(*call.logits, [&](Stream stream) {
    RouteArgs args;
    args.tokens = call.logits->size(0);
    args.experts = static_cast<int>(call.logits->size(1));
    args.top_k = static_cast<int>(call.top_k);
    args.renormalize = call.renormalize;
    args.logits = cuda::input_data("logits", call.logits);
    args.indices = static_cast<int32_t*>(cuda::output_data("indices", call.indices));
    args.weights = cuda::output_data("weights", call.weights);
    visit_dtype(dtype_of(*call.logits), [&](auto type) {
      visit_held(args.experts, [&](auto held) {
        launch(route<typename decltype(type)::type, held()>, warp_grid(args.tokens, stream), args);
      });
    });
  });
}

}  // namespace rudnn
