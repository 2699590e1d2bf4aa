#include "cpu/combine.h"

#include "common/cpu/dispatch.h"
#include "common/cpu/float_row.h"
#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "cpu/sum_rows.h"
#include "ops/combine.h"

namespace rudnn {
namespace {

// What a look at the maps for one slot costs, in elements that are copied.
constexpr int64_t kSlotCost = 8;

}  // namespace

void sum_rows(const Tensor& input, const float* weights, const Tensor& slot_rows, const Tensor& output) {
  static const auto tokens = RUDNN_CHOOSE(combine_tokens);
  CombineArgs args;
  args.dtype = dtype_of(input);
  args.width = input.size(1);
  args.top_k = slot_rows.size(1);
  args.rows = input.size(0);
  args.input = input.const_data_ptr();
  args.weights = weights;
  args.slot_rows = static_cast<const int32_t*>(slot_rows.const_data_ptr());
  args.output = output.mutable_data_ptr();
  cpu::advise_huge_pages(&output);
  cpu::parallel_for(output.size(0), args.width * (args.top_k + 1),
                    [&](int64_t begin, int64_t end) { tokens(args, begin, end); });
}

void launch_combine(const CombineCall& call) {
  const cpu::FloatRow weights(call.weights);
  sum_rows(*call.expert_output, weights.data(), *call.slot_rows, *call.output);
}

// Each dot product is one thread's, over the lanes of its vectors, for both strategies: `plane` is about GPUs.
void launch_combine_backward(const CombineBackwardCall& call) {
  static const auto rows = RUDNN_CHOOSE(combine_backward_rows);
  static const auto slots = RUDNN_CHOOSE(combine_backward_slots);
  const cpu::FloatRow weights(call.weights);
  CombineBackwardArgs args;
  args.dtype = dtype_of(*call.expert_output);
  args.width = call.expert_output->size(1);
  args.top_k = call.slot_rows->size(1);
  args.rows = call.expert_output->size(0);
  args.grad = call.grad->const_data_ptr();
  args.input = call.expert_output->const_data_ptr();
  args.weights = weights.data();
  args.row_slots = static_cast<const int32_t*>(call.row_slots->const_data_ptr());
  args.slot_rows = static_cast<const int32_t*>(call.slot_rows->const_data_ptr());
  args.grad_input = mutable_data_or_null(call.grad_expert_output);
  args.grad_weights = static_cast<float*>(mutable_data_or_null(call.grad_weights));
  cpu::advise_huge_pages(call.grad_expert_output);
  cpu::parallel_for(args.rows, 2 * args.width + 1, [&](int64_t begin, int64_t end) { rows(args, begin, end); });
  if (args.grad_weights == nullptr) return;
  cpu::parallel_for(args.rows, kSlotCost, [&](int64_t begin, int64_t end) { slots(args, begin, end); });
}

}  // namespace rudnn
