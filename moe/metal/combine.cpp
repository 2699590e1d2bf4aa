#include "metal/combine.h"

#include "metal/combine_args.h"
#include "ops/combine.h"

namespace rudnn {
namespace {

CombineArgs args_of(const CombineBackwardCall& call) {
  return {call.weights->size(0), call.weights->size(1), call.weights->numel(), call.grad->size(1)};
}

void run_rows_backward(const CombineBackwardCall& call, const metal::Memory& grad, const metal::Memory& weights) {
  const CombineArgs args = args_of(call);
  const DType dtype = dtype_of(*call.grad);
  const MatrixPlan plan = plan_matrix(args.rows, args.width, has_aligned_rows(args.width, dtype));
  metal::Launch(instance_of("combine_backward_rows", dtype) + plan.suffix)
      .bytes(kArgsBuffer, args)
      .constant(kWeightTypeConstant, element_type(*call.weights))
      .buffer(kGradBuffer, grad)
      .buffer(kWeightsBuffer, weights)
      .buffer(kRowSlotsBuffer, metal::input_data("row_slots", call.row_slots))
      .buffer(kGradExpertOutputBuffer, metal::output_data("grad_expert_output", call.grad_expert_output))
      .run(plan.groups, plan.threads);
}

void run_weights_backward(const CombineBackwardCall& call, const metal::Memory& grad) {
  const CombineArgs args = args_of(call);
  const DType dtype = dtype_of(*call.grad);
  const char* kernel = call.plane ? "combine_backward_weights_plane" : "combine_backward_weights_serial";
  const int64_t slots = call.plane ? kDotThreads / 32 : kDotThreads;
  metal::Launch(instance_of(kernel, dtype) + (has_aligned_rows(args.width, dtype) ? "_x4" : "_x1"))
      .bytes(kArgsBuffer, args)
      .buffer(kGradBuffer, grad)
      .buffer(kExpertOutputBuffer, metal::input_data("expert_output", call.expert_output))
      .buffer(kSlotRowsBuffer, metal::input_data("slot_rows", call.slot_rows))
      .buffer(kGradWeightsBuffer, metal::output_data("grad_weights", call.grad_weights))
      .run({groups_of(args.rows, slots)}, {kDotThreads});
}

}  // namespace

void run_combine(const CombineOperands& operands) {
  const CombineArgs args = {operands.tokens, operands.choices, operands.tokens * operands.choices, operands.width};
  const MatrixPlan plan = plan_matrix(args.tokens, args.width, has_aligned_rows(args.width, operands.output_dtype));
  const std::string kernel = instance_of("combine", operands.output_dtype) + "_of_" +
                             metal::shader_type(operands.expert_output_dtype) + plan.suffix;
  metal::Launch(kernel)
      .bytes(kArgsBuffer, args)
      .constant(kWeightTypeConstant, operands.weight_type)
      .buffer(kExpertOutputBuffer, operands.expert_output)
      .buffer(kWeightsBuffer, operands.weights)
      .buffer(kSlotRowsBuffer, operands.slot_rows)
      .buffer(kOutputBuffer, operands.output)
      .run(plan.groups, plan.threads);
}

void launch_combine(const CombineCall& call) {
  if (call.weights->numel() == 0) return zero(*call.output);
  metal::run_on_device([&] {
    const DType dtype = dtype_of(*call.output);
    run_combine({call.weights->size(0), call.weights->size(1), call.output->size(1), dtype, dtype,
                 element_type(*call.weights), metal::input_data("expert_output", call.expert_output),
                 metal::input_data("weights", call.weights), metal::input_data("slot_rows", call.slot_rows),
                 metal::output_data("output", call.output)});
  });
}

void launch_combine_backward(const CombineBackwardCall& call) {
  if (call.grad->numel() == 0) {
    if (call.grad_weights != nullptr) zero(*call.grad_weights);
    return;
  }
  metal::run_on_device([&] {
    const metal::Memory grad = metal::input_data("grad", call.grad);
    if (call.grad_expert_output != nullptr) run_rows_backward(call, grad, metal::input_data("weights", call.weights));
    if (call.grad_weights != nullptr) run_weights_backward(call, grad);
  });
}

}  // namespace rudnn
