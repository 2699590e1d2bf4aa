#include "cpu/route_sigmoid_grouped.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/parallel.h"
#include "ops/route_sigmoid_grouped.h"

namespace rudnn {

void launch_route_sigmoid_grouped(const RouteSigmoidGroupedCall& call) {
  static const auto rows = RUDNN_CHOOSE(route_sigmoid_grouped_rows);
  RouteSigmoidGroupedArgs args;
  args.dtype = dtype_of(*call.logits);
  args.experts = call.logits->size(1);
  args.top_k = call.top_k;
  args.groups = call.groups;
  args.selected_groups = call.selected_groups;
  args.group_top_two = call.group_top_two;
  args.renormalize = call.renormalize;
  args.scale = call.scale;
  args.logits = call.logits->const_data_ptr();
  args.bias = static_cast<const float*>(const_data_or_null(call.bias));
  args.indices = static_cast<int32_t*>(call.indices->mutable_data_ptr());
  args.weights = call.weights->mutable_data_ptr();
  // To take one expert or group costs as much as some 64 elements of a copy.
  const int64_t taken = args.top_k + args.selected_groups;
  cpu::parallel_for(call.logits->size(0), args.experts + 64 * taken,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

}  // namespace rudnn
