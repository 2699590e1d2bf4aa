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
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks, float scale, "
      "float softcap, bool is_causal, int window_left, int window_right, bool accelerated) -> (Tensor output, Tensor "
      "lse)");
  library.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, "
      "Tensor? sinks, Tensor output, Tensor lse, float scale, float softcap, bool is_causal, int window_left, "
      "int window_right, bool accelerated, bool need_query, bool need_key, bool need_value, bool need_bias, "
      "bool need_sinks) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor "
      "grad_sinks)");
  library.def("accelerated_dtypes() -> str");
#if defined(CPU_KERNEL)
  library.def("cpu_isa() -> str");
#endif
}

RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, RUDNN_DISPATCH_KEY, library) {
  library.impl("attention", RUDNN_FUNCTION(attention));
  library.impl("attention_backward", RUDNN_FUNCTION(attention_backward));
}

RUDNN_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, library) {
  library.impl("accelerated_dtypes", RUDNN_FUNCTION(accelerated_dtypes));
#if defined(CPU_KERNEL)
  library.impl("cpu_isa", TORCH_BOX(&rudnn::cpu::isa_name));
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
