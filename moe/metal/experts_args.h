// What launchers and shaders of experts agree on.
#pragma once

#include "common/fixed_width.h"
#include "common/metal/tile_sizes.h"

namespace rudnn {

enum ExpertsLimit : int {
  kPlanThreads = 32,
  kZeroThreads = 256,
};

// Rows of the experts, from [E + 1] offsets.
struct PlanArgs {
  int64_t rows;
  int32_t experts;
};

// One of the products of an expert's rows with its weights: of [rows, depth] and [width, depth] or [depth, width].
struct RowProductArgs {
  int64_t width;
  int64_t depth;
  int64_t weight_stride;         // elements from expert to expert
  int64_t second_weight_stride;  // of the second weight, if there is one
  int32_t experts;
};

// The gradient of a weight: the sum over an expert's rows of the products of [rows, height] and [rows, width].
struct WeightProductArgs {
  int64_t height;
  int64_t width;
  int64_t gradient_stride;  // elements from expert to expert
  int32_t experts;
  int32_t rounded;  // whether it has the rows' type, else float32
};

struct ZeroArgs {
  int64_t rows;
  int64_t width;
  int32_t experts;
};

// Indices of [[buffer]] and [[function_constant]].
enum ExpertsBuffer : int {
  kArgsBuffer,
  kExpertOffsetsBuffer,
  kPlanBuffer,
  kRowsBuffer,
  kSecondRowsBuffer,
  kRowTokensBuffer,
  kWeightBuffer,
  kSecondWeightBuffer,
  kResultBuffer,
  kGateProjectionBuffer,
  kUpProjectionBuffer,
  kGradGateBuffer,
  kGradUpBuffer
};
enum ExpertsConstant : int {
  kAlignedConstant,     // all rows of all operands are multiples of 16 bytes and start at one
  kGathersConstant,     // rows are those of tokens
  kTrainingConstant,    // the projections are wanted
  kWantsHiddenConstant  // in the backward, what down is multiplied by is wanted
};

}  // namespace rudnn
