#include "cuda/attention_backward.cuh"
#include "cuda/gradients.h"
#include "cuda/launch.cuh"

namespace rudnn {

void launch_grad_value(const AttentionArgs& args, DType dtype, bool accelerated, Stream stream) {
  const int64_t rows = args.window.keys;
  visit_machine(accelerated, dtype, args.value_dim, args.head_dim, rows, [&](auto tag) {
    launch_role<GradValue, typename decltype(tag)::type>(args, args.head_dim, 0, stream);
  });
}

}  // namespace rudnn
