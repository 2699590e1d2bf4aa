#include "cuda/gated_activation.cuh"
#include "cuda/launch.cuh"
#include "ops/gated_activation.h"

namespace rudnn {
namespace {

template <class Visit>
void visit_activation(Activation activation, Visit&& visit) {
  switch (activation) {
    case Activation::kSilu:
      return visit(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kGelu:
      return visit(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return visit(std::integral_constant<Activation, Activation::kGeluTanh>{});
  }
}

GatedActivationArgs common_args(const GatedActivationCall& call) {
  GatedActivationArgs args{};
  args.width = call.input->size(-1) / 2;
  args.rows = call.input->numel() / (2 * args.width);
  args.input = cuda::input_data("input", call.input);
  return args;
}

}  // namespace

void launch_gated_activation(const GatedActivationCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    GatedActivationArgs args = common_args(call);
    args.output = cuda::output_data("output", call.output);
    visit_vectors(dtype_of(*call.input), args.width, [&](auto type, auto vector) {
      visit_activation(call.activation, [&](auto activation) {
        launch(gated_activation<typename decltype(type)::type, vector(), activation()>,
               piece_grid<vector()>(args.rows, args.width, stream), args);
      });
    });
  });
}

void launch_gated_activation_backward(const GatedActivationCall& call) {
  cuda::run_on_device(*call.input, [&](Stream stream) {
    GatedActivationArgs args = common_args(call);
    args.grad = cuda::input_data("grad", call.grad);
    args.grad_input = cuda::output_data("grad_input", call.grad_input);
    visit_vectors(dtype_of(*call.input), args.width, [&](auto type, auto vector) {
      visit_activation(call.activation, [&](auto activation) {
        launch(gated_activation_backward<typename decltype(type)::type, vector(), activation()>,
               piece_grid<vector()>(args.rows, args.width, stream), args);
      });
    });
  });
}

}  // namespace rudnn
