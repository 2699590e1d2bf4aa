// An operator as a family writes it, with the bench's engine under its CUDA launcher and CPU tensors as device memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "simt/engine/host.h"
#include "simt/tests/kernels/example_rms_norm.h"

using torch::stable::Tensor;

namespace {

void register_tensor(const Tensor& tensor, const char* name, simt::Access access) {
  simt::register_buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), name, access);
}

// Rows of x may be fewer than `rows`, an error that the engine must find.
Tensor rms_norm(const Tensor& x, const Tensor& gamma, int64_t rows) {
  Tensor y = torch::stable::empty_like(x);
  simt::BufferScope scope;
  register_tensor(x, "x", simt::Access::input);
  register_tensor(gamma, "gamma", simt::Access::input);
  register_tensor(y, "y", simt::Access::output);
  rudnn::launch_rms_norm({rows, x.size(1), 1e-6f, 0}, rudnn::DType::kFloat32, rudnn::DType::kFloat32, x.data_ptr(),
                         gamma.data_ptr(), y.data_ptr(), nullptr);
  simt::check_outputs();
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(simt_test, m) { m.def("rms_norm(Tensor x, Tensor gamma, int rows) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(simt_test, CPU, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); }
