// selected_router_weights and its gradient: the scores of experts that were chosen before.
#pragma once

#include "cuda/scores.cuh"
#include "ops/limits.h"
#include "ops/scoring.h"

namespace rudnn {

constexpr int kSelectedPerLane = kMostSelected / kWarpSize;

struct SelectedRouterArgs {
  int64_t tokens;
  int experts;
  int top_k;  // at most kMostSelected
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

// With shares n = s / d, of the chosen scores s and their divisor d, and g the gradients of the weights, a term is
// t = scale * n * g, or scale * n * (g - sum(g * n)) if d is the sum of s: a score times its gradient, without a
// division by a sum that may be very small. With T_e the sum of expert e's terms, the gradient of logit e is
// T_e - p_e * sum(t) through the softmax, and T_e * (1 - p_e) through the sigmoid.
template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) selected_router_backward(SelectedRouterArgs args) {
  __shared__ int chosen_experts[kWarpsPerBlock][kMostSelected];
  __shared__ float chosen_terms[kWarpsPerBlock][kMostSelected];
  const int64_t token = grid_warp();
  if (token >= args.tokens) return;
  const int lane = warp_lane(), warp = threadIdx.x / kWarpSize;
  const T* row = static_cast<const T*>(args.logits) + token * args.experts;
  T* grad_logits = static_cast<T*>(args.grad_logits) + token * args.experts;
  const Selection<T> selection(args, token, row);

  float shares[kSelectedPerLane], grads[kSelectedPerLane], product = 0.0f;
#pragma unroll
  for (int i = 0; i < kSelectedPerLane; ++i) {
    const int j = lane + i * kWarpSize;
    shares[i] = selection.scores[i] / selection.divisor;
    grads[i] = j < args.top_k ? args.grad_weights[token * args.top_k + j] : 0.0f;
    product += grads[i] * shares[i];
  }
  const float common = args.renormalize ? warp_sum(product) : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSelectedPerLane; ++i) {
    const int j = lane + i * kWarpSize;
    const float term = args.scale * shares[i] * (grads[i] - common);
    chosen_experts[warp][j] = selection.experts[i];
    chosen_terms[warp][j] = term;
    sum += j < args.top_k ? term : 0.0f;
  }
  sum = warp_sum(sum);
  __syncwarp();

  for (int64_t expert = lane; expert < args.experts; expert += kWarpSize) {
    float grad = 0.0f;
    for (int j = 0; j < args.top_k; ++j) grad += chosen_experts[warp][j] == expert ? chosen_terms[warp][j] : 0.0f;
    const float logit = to_float(row[expert]);
    if (args.scoring == RouterScoring::kSoftmax)
      grad -= selection.softmax.score(logit) * sum;
    else
      grad *= sigmoid(-logit);
    grad_logits[expert] = from_float<T>(selection.valid ? grad : NAN);
  }
}

}  // namespace rudnn
