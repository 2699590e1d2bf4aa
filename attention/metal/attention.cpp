#include "ops/attention.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "metal/launch.h"

namespace rudnn {
namespace {

// Without keys the output is 0, and the log-sum-exp the sink's score.
void attend_to_nothing(const AttentionCall& call) {
  zero(*call.output);
  if (call.inputs.sinks == nullptr) {
    call.lse->fill_(-std::numeric_limits<float>::infinity());
  } else {
    call.lse->copy_(call.inputs.sinks->view({1, call.lse->size(1), 1}).expand(call.lse->sizes()));
  }
}

int64_t tiles_of(const AttentionArgs& args) {
  return row_tiles_of(args.queries, args.heads / args.key_heads, kTileRows);
}

// Keys are split only where a key head has a single tile of rows.
void split_keys(AttentionArgs& args) {
  if (tiles_of(args) != 1 || args.keys <= kSplitKeys) return;
  const int64_t tiles_per_split = groups_of(groups_of(args.keys, kMaxSplits), kTileColumns);
  args.split_keys = std::max<int64_t>(kSplitKeys, tiles_per_split * kTileColumns);
  args.splits = static_cast<int32_t>(groups_of(args.keys, args.split_keys));
}

// The results of splits.
struct Splits {
  Scratch sums, maxima, weights;

  Splits(const AttentionArgs& args, const Tensor& like)
      : sums("sums of splits", like, {args.splits, args.batch, args.heads, args.queries, args.value_dim},
             ScalarType::Float),
        maxima("maxima of splits", like, {args.splits, args.batch, args.heads, args.queries}, ScalarType::Float),
        weights("weights of splits", like, {args.splits, args.batch, args.heads, args.queries}, ScalarType::Float) {}

  void bind(metal::Launch& launch) const {
    launch.buffer(kSplitSumsBuffer, sums.memory)
        .buffer(kSplitMaximaBuffer, maxima.memory)
        .buffer(kSplitWeightsBuffer, weights.memory);
  }
};

}  // namespace

bool has_matrix_units(DType dtype) { return dtype != DType::kFloat32; }

void launch_attention(const AttentionCall& call) {
  const AttentionInputs& inputs = call.inputs;
  if (inputs.key->size(2) == 0) return attend_to_nothing(call);
  metal::run_on_device([&] {
    AttentionArgs args = args_of(inputs, call.options);
    split_keys(args);
    const InputMemory memory(inputs);
    const metal::Memory output = metal::output_data("output", call.output);
    const metal::Memory lse = metal::output_data("lse", call.lse);
    std::optional<Splits> splits;
    if (args.splits > 1) splits.emplace(args, *inputs.query);

    metal::Launch launch(unit_instance("attention", inputs, call.options));
    bind_scores(inputs, memory, launch);
    bind_sinks(inputs, memory, launch);
    if (splits) splits->bind(launch);
    launch.bytes(kArgsBuffer, args)
        .constant(kAlignedKeysConstant, have_aligned_rows({inputs.query, inputs.key}))
        .constant(kAlignedValuesConstant, have_aligned_rows({inputs.value}))
        .constant(kHasSplitsConstant, splits.has_value())
        .buffer(kValueBuffer, memory.value)
        .buffer(kOutputBuffer, output)
        .buffer(kLseBuffer, lse)
        .run({static_cast<uint32_t>(tiles_of(args) * args.splits), key_heads_of(args),
              groups_of(args.value_dim, kTileColumns)},
             {kTileThreads});
    if (!splits) return;

    metal::Launch merge(instance_of("merge_splits", dtype_of(*inputs.query)));
    bind_sinks(inputs, memory, merge);
    splits->bind(merge);
    merge.bytes(kArgsBuffer, args)
        .buffer(kOutputBuffer, output)
        .buffer(kLseBuffer, lse)
        .run({groups_of(args.value_dim, kMergeColumns), groups_of(args.batch * args.heads * args.queries, kMergeRows)},
             {kMergeColumns, kMergeRows});
  });
}

}  // namespace rudnn
