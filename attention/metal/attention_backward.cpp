#include "metal/launch.h"
#include "ops/attention.h"

namespace rudnn {
namespace {

AttentionArgs args_of(const AttentionBackwardCall& call) {
  AttentionArgs args = args_of(call.inputs, call.options);
  args.grad = head_strides_of(*call.grad);
  args.output = head_strides_of(*call.output);
  return args;
}

// The launches of a call, once the sums of gradient and output are there.
class Gradients {
 public:
  explicit Gradients(const AttentionBackwardCall& call)
      : call_(call),
        args_(args_of(call)),
        memory_(call.inputs),
        grad_(metal::input_data("grad", call.grad)),
        lse_(metal::input_data("lse", call.lse)),
        delta_("delta", *call.lse, shape_of(*call.lse), ScalarType::Float) {
    metal::Launch(instance_of("attention_delta", dtype_of(*call.grad)))
        .bytes(kArgsBuffer, args_)
        .constant(kAlignedValuesConstant, have_aligned_rows({call.grad, call.output}))
        .buffer(kGradBuffer, grad_)
        .buffer(kOutputBuffer, metal::input_data("output", call.output))
        .buffer(kDeltaBuffer, delta_.memory)
        .run({groups_of(args_.heads * args_.queries, kTileThreads), static_cast<uint32_t>(args_.batch)},
             {kTileThreads});
  }

  void run_query() const {
    launch("attention_grad_query", "grad_query", *call_.grad_query)
        .run({static_cast<uint32_t>(row_tiles_of(args_.queries, args_.heads / args_.key_heads, kTileRows)),
              key_heads_of(args_), groups_of(args_.head_dim, kTileColumns)},
             {kTileThreads});
  }

  void run_key() const {
    launch("attention_grad_key", "grad_key", *call_.grad_key)
        .run({groups_of(args_.keys, kTileRows), key_heads_of(args_), groups_of(args_.head_dim, kTileColumns)},
             {kTileThreads});
  }

  void run_value() const {
    launch("attention_grad_value", "grad_value", *call_.grad_value)
        .run({groups_of(args_.keys, kTileRows), key_heads_of(args_), groups_of(args_.value_dim, kTileColumns)},
             {kTileThreads});
  }

  void run_bias() const {
    const Tensor& bias = *call_.grad_bias;
    const BiasArgs shape = {bias.size(0), bias.size(1), bias.size(2), bias.size(3)};
    launch("attention_grad_bias", "grad_bias", bias)
        .bytes(kBiasArgsBuffer, shape)
        .run({groups_of(shape.keys, kTileColumns), groups_of(shape.queries, kTileRows),
              static_cast<uint32_t>(shape.batch * shape.heads)},
             {kTileThreads});
  }

  void run_sinks() const {
    metal::Launch launch("attention_grad_sinks");
    launch.bytes(kArgsBuffer, args_)
        .constant(kSinksTypeConstant, element_type(*call_.inputs.sinks))
        .buffer(kSinksBuffer, memory_.sinks)
        .buffer(kLseBuffer, lse_)
        .buffer(kDeltaBuffer, delta_.memory)
        .buffer(kGradientBuffer, metal::output_data("grad_sinks", call_.grad_sinks))
        .run({static_cast<uint32_t>(args_.heads)}, {kSinkThreads});
  }

 private:
  // A launch of a kernel over tiles of scores, which computes one gradient.
  metal::Launch launch(const char* kernel, const char* name, const Tensor& gradient) const {
    metal::Launch launch(unit_instance(kernel, call_.inputs, call_.options));
    bind_scores(call_.inputs, memory_, launch);
    launch.bytes(kArgsBuffer, args_)
        .constant(kAlignedKeysConstant, have_aligned_rows({call_.inputs.query, call_.inputs.key}))
        .constant(kAlignedValuesConstant, have_aligned_rows({call_.inputs.value, call_.grad}))
        .buffer(kValueBuffer, memory_.value)
        .buffer(kGradBuffer, grad_)
        .buffer(kLseBuffer, lse_)
        .buffer(kDeltaBuffer, delta_.memory)
        .buffer(kGradientBuffer, metal::output_data(name, &gradient));
    return launch;
  }

  const AttentionBackwardCall& call_;
  AttentionArgs args_;
  InputMemory memory_;
  metal::Memory grad_, lse_;
  Scratch delta_;
};

}  // namespace

void launch_attention_backward(const AttentionBackwardCall& call) {
  if (call.lse->numel() == 0 || call.inputs.key->size(2) == 0) {
    for (const Tensor* gradient : {call.grad_query, call.grad_key, call.grad_value, call.grad_bias, call.grad_sinks}) {
      if (gradient != nullptr) zero(*gradient);
    }
    return;
  }
  metal::run_on_device([&] {
    const Gradients gradients(call);
    if (call.grad_query != nullptr) gradients.run_query();
    if (call.grad_key != nullptr) gradients.run_key();
    if (call.grad_value != nullptr) gradients.run_value();
    if (call.grad_bias != nullptr) gradients.run_bias();
    if (call.grad_sinks != nullptr) gradients.run_sinks();
  });
}

}  // namespace rudnn
