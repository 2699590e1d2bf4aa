#include "cuda/attention_backward.cuh"
#include "cuda/gradients.h"
#include "cuda/launch.cuh"

namespace rudnn {

void launch_grad_query(const AttentionArgs& args, DType dtype, bool accelerated, Stream stream) {
  const int64_t rows = args.group() * args.window.queries;
  visit_machine(accelerated, dtype, args.head_dim, args.head_dim + args.value_dim, rows, [&](auto tag) {
    launch_role<GradQuery, typename decltype(tag)::type>(args, args.head_dim, args.value_dim, stream);
  });
}

}  // namespace rudnn
