// selected_router_weights and its gradient: the scores of experts that were chosen before.
#pragma once

#include "cuda/scores.cuh"
#include "ops/limits.h"
#include "ops/scoring.h"

namespace rudnn {

constexpr int kSelectedPerLane = kMaxSelected / kWarpSize;

struct SelectedRouterArgs {
  int64_t tokens;
  int experts;
  int top_k;  // at most kMaxSelected
  RouterScoring scoring;
  bool renormalize;
  float scale;
  const void* logits;         // [tokens, experts]
  Indices indices;            // [tokens, top_k]
  float* weights;             // [tokens, top_k], in the forward
  const float* grad_weights;  // [tokens, top_k], in the backward
  void* grad_logits;          // [tokens, experts]
};

// What a lane knows of the experts chosen for its warp's token: those in positions lane and lane + 32.
template <class T>
struct Selection {
  Softmax softmax;
  int experts[kSelectedPerLane];
  float scores[kSelectedPerLane];  // 0 past the last
  float divisor;                   // what renormalising divides the scores by
  bool valid;                      // whether all chosen experts exist; the same in every lane

  __device__ __forceinline__ Selection(const SelectedRouterArgs& args, int64_t token, const T* row) {
    if (args.scoring == RouterScoring::kSoftmax) {
      softmax = warp_softmax([&](auto visit) {
        for (int64_t expert = warp_lane(); expert < args.experts; expert += kWarpSize)
          visit(static_cast<int>(expert), to_float(row[expert]));
      });
    }
    float sum = 0.0f;
    valid = true;
#pragma unroll
    for (int i = 0; i < kSelectedPerLane; ++i) {
      const int j = warp_lane() + i * kWarpSize;
      experts[i] = 0;
      scores[i] = 0.0f;
      if (j >= args.top_k) continue;
      const int64_t expert = args.indices[token * args.top_k + j];
      if (expert < 0 || expert >= args.experts) {
        valid = false;
        continue;
      }
      const float logit = to_float(row[expert]);
      experts[i] = static_cast<int>(expert);
      scores[i] = args.scoring == RouterScoring::kSoftmax ? softmax.score(logit) : sigmoid(logit);
      sum += scores[i];
    }
    valid = __all_sync(kFullMask, valid);
    divisor = args.renormalize ? warp_sum(sum) + kRenormalizeEpsilon : 1.0f;
  }
};

template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) selected_router_weights(SelectedRouterArgs args) {
  const int64_t token = grid_warp();
  if (token >= args.tokens) return;
  const Selection<T> selection(args, token, static_cast<const T*>(args.logits) + token * args.experts);
#pragma unroll
  for (int i = 0; i < kSelectedPerLane; ++i) {
    const int j = warp_lane() + i * kWarpSize;
    const float weight = selection.scores[i] / selection.divisor * args.scale;
    if (j < args.top_k) args.weights[token * args.top_k + j] = selection.valid ? weight : NAN;
  }
}

// With s the chosen scores, d their divisor and g the gradient of the weights times the scale, the gradient of s is
// g / d, less sum(g * s) / d^2 if d is their sum. Through the softmax, that of logit e is p_e * (G_e - sum(p * G))
// where G_e sums the gradients of expert e's scores; through the sigmoid it is p_e * (1 - p_e) * G_e.
template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) selected_router_backward(SelectedRouterArgs args) {
  __shared__ int chosen_experts[kWarpsPerBlock][kMaxSelected];
  __shared__ float chosen_grads[kWarpsPerBlock][kMaxSelected];
  const int64_t token = grid_warp();
  if (token >= args.tokens) return;
  const int lane = warp_lane(), warp = threadIdx.x / kWarpSize;
  const T* row = static_cast<const T*>(args.logits) + token * args.experts;
  T* grad_logits = static_cast<T*>(args.grad_logits) + token * args.experts;
  const Selection<T> selection(args, token, row);

  float grads[kSelectedPerLane], product = 0.0f;
#pragma unroll
  for (int i = 0; i < kSelectedPerLane; ++i) {
    const int j = lane + i * kWarpSize;
    grads[i] = j < args.top_k ? args.grad_weights[token * args.top_k + j] * args.scale / selection.divisor : 0.0f;
    product += grads[i] * selection.scores[i];
  }
  const float common = args.renormalize ? warp_sum(product) / selection.divisor : 0.0f;
  float through_softmax = 0.0f;
#pragma unroll
  for (int i = 0; i < kSelectedPerLane; ++i) {
    const int j = lane + i * kWarpSize;
    if (j < args.top_k) grads[i] -= common;
    chosen_experts[warp][j] = selection.experts[i];
    chosen_grads[warp][j] = grads[i];
    through_softmax += grads[i] * selection.scores[i];
  }
  through_softmax = warp_sum(through_softmax);
  __syncwarp();

  for (int64_t expert = lane; expert < args.experts; expert += kWarpSize) {
    float grad = 0.0f;
    for (int j = 0; j < args.top_k; ++j) grad += chosen_experts[warp][j] == expert ? chosen_grads[warp][j] : 0.0f;
    const float logit = to_float(row[expert]);
    if (args.scoring == RouterScoring::kSoftmax)
      grad = selection.softmax.score(logit) * (grad - through_softmax);
    else
      grad *= sigmoid(logit) * sigmoid(-logit);
    grad_logits[expert] = from_float<T>(selection.valid ? grad : NAN);
  }
}

}  // namespace rudnn
