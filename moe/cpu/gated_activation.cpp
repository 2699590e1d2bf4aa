#include "cpu/gated_activation.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "ops/gated_activation.h"

namespace rudnn {
namespace {

// What an element costs beside one that is only copied.
constexpr int64_t kElementCost = 4;

GatedActivationArgs args_of(const GatedActivationCall& call) {
  GatedActivationArgs args;
  args.dtype = dtype_of(*call.input);
  args.width = call.input->size(-1) / 2;
  args.activation = call.activation;
  args.input = call.input->const_data_ptr();
  args.output = mutable_data_or_null(call.output);
  args.grad = const_data_or_null(call.grad);
  args.grad_input = mutable_data_or_null(call.grad_input);
  return args;
}

}  // namespace

void launch_gated_activation(const GatedActivationCall& call) {
  static const auto rows = RUDNN_CHOOSE(gated_activation_rows);
  const GatedActivationArgs args = args_of(call);
  cpu::advise_huge_pages(call.output);
  cpu::parallel_for(call.input->numel() / (2 * args.width), kElementCost * args.width,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

void launch_gated_activation_backward(const GatedActivationCall& call) {
  static const auto rows = RUDNN_CHOOSE(gated_activation_backward_rows);
  const GatedActivationArgs args = args_of(call);
  cpu::advise_huge_pages(call.grad_input);
  cpu::parallel_for(call.input->numel() / (2 * args.width), 2 * kElementCost * args.width,
                    [&](int64_t begin, int64_t end) { rows(args, begin, end); });
}

}  // namespace rudnn
