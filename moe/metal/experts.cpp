#include "ops/experts.h"

#include "metal/combine.h"
#include "metal/experts_args.h"
#include "metal/row_map.h"

namespace rudnn {
namespace {

// The weights of all experts, and the sizes that they give.
struct Weights {
  const Tensor *gate_tensor, *up_tensor, *down_tensor;
  metal::Memory gate, up, down;

  explicit Weights(const ExpertWeights& weights)
      : gate_tensor(weights.gate),
        up_tensor(weights.up),
        down_tensor(weights.down),
        gate(metal::input_data("gate", weights.gate)),
        up(metal::input_data("up", weights.up)),
        down(metal::input_data("down", weights.down)) {}

  int32_t experts() const { return static_cast<int32_t>(down_tensor->size(0)); }
  int64_t hidden() const { return down_tensor->size(1); }
  int64_t intermediate() const { return down_tensor->size(2); }
  DType dtype() const { return dtype_of(*down_tensor); }

  // Whether every row of every operand starts at a multiple of 16 bytes.
  bool aligned() const {
    return has_aligned_rows(hidden(), dtype()) && has_aligned_rows(intermediate(), dtype()) &&
           has_aligned_rows(gate_tensor->stride(0), dtype()) && has_aligned_rows(up_tensor->stride(0), dtype()) &&
           has_aligned_rows(down_tensor->stride(0), dtype());
  }
};

// Launches over the rows of experts.
class ExpertRows {
 public:
  ExpertRows(const Weights& weights, bool tensor_core, const metal::Memory& expert_offsets, int64_t rows,
             const Tensor& like)
      : weights_(weights),
        unit_(tensor_core ? "tensor_core" : "scalar"),
        rows_(rows),
        plan_("plan of rows", like, {2 * (int64_t{weights.experts()} + 1)}, ScalarType::Int) {
    metal::Launch("plan_rows")
        .bytes(kArgsBuffer, PlanArgs{rows, weights.experts()})
        .buffer(kExpertOffsetsBuffer, expert_offsets)
        .buffer(kPlanBuffer, plan_.memory)
        .run({1}, {kPlanThreads});
  }

  // A launch of the kernel's instance for the weights' dtype.
  metal::Launch launch(const std::string& kernel) const {
    metal::Launch launch(instance_of(kernel + "_" + unit_, weights_.dtype()));
    launch.buffer(kPlanBuffer, plan_.memory).constant(kAlignedConstant, weights_.aligned());
    return launch;
  }

  RowProductArgs args(int64_t width, int64_t depth, const Tensor& weight, const Tensor& second) const {
    return {width, depth, weight.stride(0), second.stride(0), weights_.experts()};
  }

  // Runs a kernel that has the tiles of all rows. There are no more tiles than whole ones and one for each expert.
  void run(const metal::Launch& launch, int64_t width) const {
    const int64_t tiles = rows_ / kTileRows + std::min(rows_, int64_t{weights_.experts()});
    launch.run({groups_of(width, kTileColumns), static_cast<uint32_t>(tiles)}, {kTileThreads});
  }

  void zero_rows_of_no_expert(const metal::Memory& result, int64_t width) const {
    constexpr int64_t kMostGroups = 64;
    metal::Launch(instance_of("zero_rows", weights_.dtype()))
        .bytes(kArgsBuffer, ZeroArgs{rows_, width, weights_.experts()})
        .buffer(kPlanBuffer, plan_.memory)
        .buffer(kResultBuffer, result)
        .run({groups_of(std::min(rows_ * width, kMostGroups * kZeroThreads), kZeroThreads)}, {kZeroThreads});
  }

 private:
  const Weights& weights_;
  const char* unit_;
  int64_t rows_;
  Scratch plan_;
};

// The projections that training wants; none otherwise.
struct Projections {
  metal::Memory gate, up;
};

// `row_tokens` says which row of `values` each row is, if it is there.
void run_hidden(const ExpertRows& rows, const Weights& weights, const metal::Memory& values,
                const metal::Memory& row_tokens, const metal::Memory& hidden, const Projections& projections) {
  metal::Launch launch = rows.launch("experts_hidden");
  launch
      .bytes(kArgsBuffer, rows.args(weights.intermediate(), weights.hidden(), *weights.gate_tensor, *weights.up_tensor))
      .constant(kGathersConstant, row_tokens.storage != nullptr)
      .constant(kTrainingConstant, projections.gate.storage != nullptr)
      .buffer(kRowsBuffer, values)
      .buffer(kRowTokensBuffer, row_tokens)
      .buffer(kWeightBuffer, weights.gate)
      .buffer(kSecondWeightBuffer, weights.up)
      .buffer(kResultBuffer, hidden)
      .buffer(kGateProjectionBuffer, projections.gate)
      .buffer(kUpProjectionBuffer, projections.up);
  rows.run(launch, weights.intermediate());
}

void run_output(const ExpertRows& rows, const Weights& weights, const char* kernel, const metal::Memory& hidden,
                const metal::Memory& output) {
  metal::Launch launch = rows.launch(kernel);
  launch
      .bytes(kArgsBuffer,
             rows.args(weights.hidden(), weights.intermediate(), *weights.down_tensor, *weights.down_tensor))
      .buffer(kRowsBuffer, hidden)
      .buffer(kWeightBuffer, weights.down)
      .buffer(kResultBuffer, output);
  rows.run(launch, weights.hidden());
}

// What reaches the gate and up projections, and the hidden rows if their weight's gradient is wanted.
struct HiddenGradients {
  Scratch gate, up;
  std::optional<Scratch> hidden;
};

HiddenGradients run_hidden_backward(const ExpertRows& rows, const Weights& weights, const ExpertsBackwardCall& call,
                                    const metal::Memory& grad) {
  const std::vector<int64_t> shape = {call.grad->size(0), weights.intermediate()};
  const ScalarType type = call.grad->scalar_type();
  HiddenGradients gradients{{"gate gradient", *call.grad, shape, type}, {"up gradient", *call.grad, shape, type}, {}};
  const bool wants_hidden = call.grad_weights.down != nullptr;
  if (wants_hidden) gradients.hidden.emplace("hidden rows", *call.grad, shape, type);
  metal::Launch launch = rows.launch("experts_hidden_backward");
  launch
      .bytes(kArgsBuffer,
             rows.args(weights.intermediate(), weights.hidden(), *weights.down_tensor, *weights.down_tensor))
      .constant(kWantsHiddenConstant, wants_hidden)
      .buffer(kRowsBuffer, grad)
      .buffer(kWeightBuffer, weights.down)
      .buffer(kGateProjectionBuffer, metal::input_data("gate_projection", call.gate_projection))
      .buffer(kUpProjectionBuffer, metal::input_data("up_projection", call.up_projection))
      .buffer(kGradGateBuffer, gradients.gate.memory)
      .buffer(kGradUpBuffer, gradients.up.memory)
      .buffer(kResultBuffer, wants_hidden ? gradients.hidden->memory : metal::Memory{});
  rows.run(launch, weights.intermediate());
  return gradients;
}

void run_values_backward(const ExpertRows& rows, const Weights& weights, const HiddenGradients& gradients,
                         const metal::Memory& grad_values) {
  metal::Launch launch = rows.launch("experts_values_backward");
  launch
      .bytes(kArgsBuffer, rows.args(weights.hidden(), weights.intermediate(), *weights.gate_tensor, *weights.up_tensor))
      .buffer(kRowsBuffer, gradients.gate.memory)
      .buffer(kSecondRowsBuffer, gradients.up.memory)
      .buffer(kWeightBuffer, weights.gate)
      .buffer(kSecondWeightBuffer, weights.up)
      .buffer(kResultBuffer, grad_values);
  rows.run(launch, weights.hidden());
  rows.zero_rows_of_no_expert(grad_values, weights.hidden());
}

// The gradient of one weight [E, height, width].
void run_weight_backward(const ExpertRows& rows, const char* name, const Tensor& gradient, const metal::Memory& grads,
                         const metal::Memory& inputs) {
  const int64_t experts = gradient.size(0), height = gradient.size(1), width = gradient.size(2);
  metal::Launch launch = rows.launch("experts_weight_backward");
  launch
      .bytes(kArgsBuffer, WeightProductArgs{height, width, gradient.stride(0), static_cast<int32_t>(experts),
                                            gradient.scalar_type() != ScalarType::Float})
      .buffer(kRowsBuffer, grads)
      .buffer(kSecondRowsBuffer, inputs)
      .buffer(kResultBuffer, metal::output_data(name, &gradient))
      .run({groups_of(width, kTileColumns), groups_of(height, kTileRows), static_cast<uint32_t>(experts)},
           {kTileThreads});
}

}  // namespace

bool has_tensor_core(DType dtype) { return dtype != DType::kFloat32; }

void launch_experts(const ExpertsCall& call) {
  metal::run_on_device([&] {
    const Weights weights(call.weights);
    const int64_t count = call.values->size(0);
    const ExpertRows rows(weights, call.tensor_core, metal::input_data("expert_offsets", call.expert_offsets), count,
                          *call.values);
    const Scratch hidden("hidden rows", *call.values, {count, weights.intermediate()}, call.values->scalar_type());
    const Projections projections = {metal::output_data("gate_projection", call.gate_projection),
                                     metal::output_data("up_projection", call.up_projection)};
    const metal::Memory output = metal::output_data("output", call.output);
    run_hidden(rows, weights, metal::input_data("values", call.values), {}, hidden.memory, projections);
    run_output(rows, weights, "experts_output", hidden.memory, output);
    rows.zero_rows_of_no_expert(output, weights.hidden());
    if (call.gate_projection == nullptr) return;
    rows.zero_rows_of_no_expert(projections.gate, weights.intermediate());
    rows.zero_rows_of_no_expert(projections.up, weights.intermediate());
  });
}

void launch_experts_backward(const ExpertsBackwardCall& call) {
  const ExpertWeights& wanted = call.grad_weights;
  if (call.values->size(0) == 0) {
    for (const Tensor* gradient : {wanted.gate, wanted.up, wanted.down}) {
      if (gradient != nullptr) zero(*gradient);
    }
    return;
  }
  metal::run_on_device([&] {
    const Weights weights(call.weights);
    const ExpertRows rows(weights, call.tensor_core, metal::input_data("expert_offsets", call.expert_offsets),
                          call.values->size(0), *call.values);
    const metal::Memory grad = metal::input_data("grad", call.grad);
    const HiddenGradients gradients = run_hidden_backward(rows, weights, call, grad);
    if (call.grad_values != nullptr)
      run_values_backward(rows, weights, gradients, metal::output_data("grad_values", call.grad_values));
    const metal::Memory values = metal::input_data("values", call.values);
    if (wanted.gate != nullptr) run_weight_backward(rows, "grad_gate", *wanted.gate, gradients.gate.memory, values);
    if (wanted.up != nullptr) run_weight_backward(rows, "grad_up", *wanted.up, gradients.up.memory, values);
    if (wanted.down != nullptr) run_weight_backward(rows, "grad_down", *wanted.down, grad, gradients.hidden->memory);
  });
}

void launch_fused_experts(const FusedExpertsCall& call) {
  metal::run_on_device([&] {
    const Weights weights(call.expert_weights);
    const Tensor& like = *call.input;
    const int64_t tokens = call.indices->size(0), choices = call.indices->size(1), slots = tokens * choices;
    const Scratch expert_offsets("expert_offsets", like, {weights.experts() + int64_t{1}}, ScalarType::Int);
    const Scratch row_experts("row_experts", like, {slots}, ScalarType::Int);
    const Scratch row_tokens("row_tokens", like, {slots}, ScalarType::Int);
    const Scratch row_slots("row_slots", like, {slots}, ScalarType::Int);
    const Scratch slot_rows("slot_rows", like, {slots}, ScalarType::Int);
    run_row_map(*call.indices, weights.experts(),
                {expert_offsets.memory, row_experts.memory, row_tokens.memory, row_slots.memory, slot_rows.memory});

    const ExpertRows rows(weights, call.tensor_core, expert_offsets.memory, slots, like);
    const Scratch hidden("hidden rows", like, {slots, weights.intermediate()}, like.scalar_type());
    run_hidden(rows, weights, metal::input_data("input", call.input), row_tokens.memory, hidden.memory, {});
    const Scratch output("expert output", like, {slots, weights.hidden()}, ScalarType::Float);
    const char* kernel = weights.dtype() == DType::kFloat32 ? "experts_output" : "experts_wide_output";
    run_output(rows, weights, kernel, hidden.memory, output.memory);
    run_combine({tokens, choices, weights.hidden(), weights.dtype(), DType::kFloat32, element_type(*call.weights),
                 output.memory, metal::input_data("weights", call.weights), slot_rows.memory,
                 metal::output_data("output", call.output)});
  });
}

}  // namespace rudnn
