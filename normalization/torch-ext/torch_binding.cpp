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
  library.def("rms_norm(Tensor input, Tensor gamma, float epsilon, bool zero_centered) -> Tensor");
  library.def("rms_norm_gated(Tensor input, Tensor gate, Tensor gamma, float epsilon, str activation) -> Tensor");
  library.def(
      "fused_add_rms_norm(Tensor input, Tensor residual, Tensor gamma, float epsilon) -> (Tensor output, Tensor sum)");
  library.def("layer_norm(Tensor input, Tensor gamma, Tensor? beta, float epsilon) -> Tensor");
  library.def(
      "fused_add_layer_norm(Tensor input, Tensor residual, Tensor gamma, Tensor? beta, float epsilon) "
      "-> (Tensor output, Tensor sum)");
  library.def("softmax_last_axis(Tensor input) -> Tensor");

  library.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor input, Tensor gamma, float epsilon, bool zero_centered, "
      "bool need_input, bool need_gamma) -> (Tensor grad_input, Tensor grad_gamma)");
  library.def(
      "rms_norm_gated_backward(Tensor grad, Tensor input, Tensor gate, Tensor gamma, float epsilon, str activation, "
      "bool need_input, bool need_gate, bool need_gamma) -> (Tensor grad_input, Tensor grad_gate, Tensor grad_gamma)");
  library.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor input, Tensor gamma, float epsilon, bool need_input, "
      "bool need_gamma, bool need_beta) -> (Tensor grad_input, Tensor grad_gamma, Tensor grad_beta)");
  library.def("softmax_last_axis_backward(Tensor grad, Tensor output) -> Tensor");

#if defined(CPU_KERNEL)
  library.def("cpu_isa() -> str");
#endif
}

RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, RUDNN_DISPATCH_KEY, library) {
  library.impl("rms_norm", RUDNN_FUNCTION(rms_norm));
  library.impl("rms_norm_gated", RUDNN_FUNCTION(rms_norm_gated));
  library.impl("fused_add_rms_norm", RUDNN_FUNCTION(fused_add_rms_norm));
  library.impl("layer_norm", RUDNN_FUNCTION(layer_norm));
  library.impl("fused_add_layer_norm", RUDNN_FUNCTION(fused_add_layer_norm));
  library.impl("softmax_last_axis", RUDNN_FUNCTION(softmax_last_axis));
  library.impl("rms_norm_backward", RUDNN_FUNCTION(rms_norm_backward));
  library.impl("rms_norm_gated_backward", RUDNN_FUNCTION(rms_norm_gated_backward));
  library.impl("layer_norm_backward", RUDNN_FUNCTION(layer_norm_backward));
  library.impl("softmax_last_axis_backward", RUDNN_FUNCTION(softmax_last_axis_backward));
}

#if defined(CPU_KERNEL)
RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, library) {
  library.impl("cpu_isa", TORCH_BOX(&rudnn::cpu::isa_name));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
