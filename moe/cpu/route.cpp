#include "cpu/route.h"

#include <vector>

#include "common/cpu/dispatch.h"
#include "common/cpu/parallel.h"
#include "cpu/selection.h"
#include "ops/route.h"

namespace rudnn {

void launch_route(const RouteCall& call) {
  static const auto rows = RUDNN_CHOOSE(route_rows);
  RouteArgs args;
  args.dtype = dtype_of(*call.logits);
  args.experts = call.logits->size(1);
  args.top_k = call.top_k;
  args.renormalize = call.renormalize;
  args.logits = call.logits->const_data_ptr();
  args.indices = static_cast<int32_t*>(call.indices->mutable_data_ptr());
  args.weights = call.weights->mutable_data_ptr();
  // To take one expert costs as much as some 64 elements of a copy.
  cpu::parallel_for(call.logits->size(0), args.experts + 64 * args.top_k, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(args.experts + args.top_k);
    std::vector<int32_t> orders(selection_orders(args.experts) + selection_blocks(args.experts));
    const RouteScratch scratch{scores.data(), scores.data() + args.experts, orders.data(),
                               orders.data() + selection_orders(args.experts)};
    rows(args, scratch, begin, end);
  });
}

}  // namespace rudnn
