#include "torch_binding.h"

#include "registration.h"

#if defined(METAL_KERNEL)
#include <torch/library.h>
#define RUDNN_LIBRARY TORCH_LIBRARY_EXPAND
#define RUDNN_LIBRARY_IMPL TORCH_LIBRARY_IMPL_EXPAND
#define RUDNN_FUNCTION(function) &rudnn::function
#else
#include <torch/csrc/stable/library.h>
#define RUDNN_LIBRARY STABLE_TORCH_LIBRARY_EXPAND
#define RUDNN_LIBRARY_IMPL STABLE_TORCH_LIBRARY_IMPL_EXPAND
#define RUDNN_FUNCTION(function) TORCH_BOX(&rudnn::function)
#endif

// On the bench, GPU kernels run on the CPU and take its tensors.
#if defined(CPU_KERNEL) || defined(RUDNN_SIMT)
#define RUDNN_DISPATCH_KEY CPU
#elif defined(CUDA_KERNEL)
#define RUDNN_DISPATCH_KEY CUDA
#else
#define RUDNN_DISPATCH_KEY MPS
#endif

#if defined(CPU_KERNEL)
#include "common/cpu/dispatch.h"
#endif

RUDNN_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("route(Tensor logits, int top_k, bool renormalize) -> (Tensor indices, Tensor weights)");
  library.def(
      "route_sigmoid_grouped(Tensor logits, Tensor? bias, int top_k, int groups, int selected_groups, "
      "bool group_top_two, bool renormalize, float scale) -> (Tensor indices, Tensor weights)");
  library.def(
      "selected_router_weights(Tensor logits, Tensor indices, str scoring, bool renormalize, float scale) -> Tensor");
  library.def(
      "selected_router_backward(Tensor logits, Tensor indices, Tensor grad_weights, str scoring, bool renormalize, "
      "float scale) -> Tensor");

  library.def(
      "dispatch(Tensor input, Tensor indices, int experts) -> (Tensor values, Tensor expert_offsets, "
      "Tensor row_experts, Tensor row_tokens, Tensor row_slots, Tensor slot_rows)");
  library.def("dispatch_backward(Tensor grad_values, Tensor slot_rows) -> Tensor");
  library.def("combine(Tensor expert_output, Tensor weights, Tensor slot_rows) -> Tensor");
  library.def(
      "combine_backward(Tensor grad, Tensor expert_output, Tensor weights, Tensor row_slots, Tensor slot_rows, "
      "bool plane, bool need_expert_output, bool need_weights) -> (Tensor grad_expert_output, Tensor grad_weights)");

  library.def(
      "experts(Tensor values, Tensor expert_offsets, Tensor gate, Tensor? up, Tensor down, bool tensor_core) "
      "-> Tensor");
  library.def(
      "experts_training(Tensor values, Tensor expert_offsets, Tensor gate, Tensor? up, Tensor down, bool tensor_core) "
      "-> (Tensor output, Tensor gate_projection, Tensor up_projection)");
  library.def(
      "experts_backward(Tensor grad, Tensor values, Tensor expert_offsets, Tensor gate, Tensor? up, Tensor down, "
      "Tensor gate_projection, Tensor up_projection, bool tensor_core, bool float32_weights, bool need_values, "
      "bool need_gate, bool need_up, bool need_down) -> (Tensor grad_values, Tensor grad_gate, Tensor grad_up, Tensor "
      "grad_down)");
  library.def(
      "fused_experts(Tensor input, Tensor indices, Tensor weights, Tensor gate, Tensor? up, Tensor down, "
      "bool tensor_core) -> Tensor");

  library.def("gated_activation(Tensor input, str activation) -> Tensor");
  library.def("gated_activation_backward(Tensor grad, Tensor input, str activation) -> Tensor");

  library.def("tensor_core_dtypes() -> str");
#if defined(CPU_KERNEL)
  library.def("cpu_isa() -> str");
#endif
}

RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, RUDNN_DISPATCH_KEY, library) {
  library.impl("route", RUDNN_FUNCTION(route));
  library.impl("route_sigmoid_grouped", RUDNN_FUNCTION(route_sigmoid_grouped));
  library.impl("selected_router_weights", RUDNN_FUNCTION(selected_router_weights));
  library.impl("selected_router_backward", RUDNN_FUNCTION(selected_router_backward));
  library.impl("dispatch", RUDNN_FUNCTION(dispatch));
  library.impl("dispatch_backward", RUDNN_FUNCTION(dispatch_backward));
  library.impl("combine", RUDNN_FUNCTION(combine));
  library.impl("combine_backward", RUDNN_FUNCTION(combine_backward));
  library.impl("experts", RUDNN_FUNCTION(experts));
  library.impl("experts_training", RUDNN_FUNCTION(experts_training));
  library.impl("experts_backward", RUDNN_FUNCTION(experts_backward));
  library.impl("fused_experts", RUDNN_FUNCTION(fused_experts));
  library.impl("gated_activation", RUDNN_FUNCTION(gated_activation));
  library.impl("gated_activation_backward", RUDNN_FUNCTION(gated_activation_backward));
}

RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, library) {
  library.impl("tensor_core_dtypes", RUDNN_FUNCTION(tensor_core_dtypes));
#if defined(CPU_KERNEL)
  library.impl("cpu_isa", TORCH_BOX(&rudnn::cpu::isa_name));
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
