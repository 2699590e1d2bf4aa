#include <algorithm>

#include "cuda/attention.cuh"
#include "cuda/launch.cuh"

namespace rudnn {
namespace {

// Keys are split where a key head has a single tile of rows, so that blocks have work. How depends on one key head
// alone.
constexpr int64_t kSplitKeys = 256, kMaxSplits = 64;

void split_keys(int64_t row_tiles, AttentionArgs& args) {
  const int64_t keys = args.window.keys;
  args.split_keys = keys;
  if (row_tiles != 1 || keys <= kSplitKeys) return;
  args.split_keys = std::max(kSplitKeys, ceil_divide(ceil_divide(keys, kMaxSplits), kStreamed) * kStreamed);
  args.splits = ceil_divide(keys, args.split_keys);
}

}  // namespace

void launch_attention(const AttentionCall& call) {
  const AttentionInputs& inputs = call.inputs;
  cuda::run_on_device(*inputs.query, [&](Stream stream) {
    AttentionArgs args = common_args(inputs, call.options);
    args.output = cuda::output_data("output", call.output);
    args.lse = static_cast<float*>(cuda::output_data("lse", call.lse));
    const DType dtype = dtype_of(*inputs.query);
    const int64_t head_rows = args.group() * args.window.queries;
    visit_machine(call.options.accelerated, dtype, args.value_dim, args.head_dim, head_rows, [&](auto tag) {
      using Machine = typename decltype(tag)::type;
      split_keys(Forward<Machine>::tiles(args), args);
      if (args.splits == 1) return launch_role<Forward, Machine>(args, args.head_dim, 0, stream);
      const int64_t rows = args.splits * call.lse->numel();
      const Tensor output = new_empty(*inputs.query, {rows, args.value_dim}, ScalarType::Float);
      const Tensor maximum = new_empty(*inputs.query, {rows}, ScalarType::Float);
      const Tensor sum = new_empty(*inputs.query, {rows}, ScalarType::Float);
      args.split_output = static_cast<float*>(cuda::scratch_data("split_output", &output));
      args.split_maximum = static_cast<float*>(cuda::scratch_data("split_maximum", &maximum));
      args.split_sum = static_cast<float*>(cuda::scratch_data("split_sum", &sum));
      launch_role<Forward, Machine>(args, args.head_dim, 0, stream);
      launch(merge_splits<typename Machine::Element>, grid_of(call.lse->numel(), kWarpSize, 0, stream), args);
    });
  });
}

// Every device that the kernels are compiled for, from capability 8.0 on, multiplies both.
bool has_matrix_units(DType dtype) { return dtype != DType::kFloat32; }

}  // namespace rudnn
