// selected_router: the weights of experts that have been chosen, and their gradient.
#include "metal/elements.h"
#include "metal/router.h"
#include "metal/selected_router_args.h"

using namespace metal;
using namespace rudnn;

constant bool kLongIndices [[function_constant(kLongIndicesConstant)]];
constant bool kSigmoid [[function_constant(kSigmoidConstant)]];  // else softmax
constant bool kRenormalize [[function_constant(kRenormalizeConstant)]];

// A lane's choices of its token: lane, lane + 32.
struct LaneChoices {
  int experts[kHeldChoices];  // -1 where there is no such choice
  float scores[kHeldChoices];
  float sum;  // of all lanes' scores
  bool is_valid;
};

template <typename T>
inline LaneChoices choices_of(constant SelectedRouterArgs& args, device const T* logits, device const void* indices,
                              long token, Softmax softmax, uint lane) {
  LaneChoices choices;
  float sum = 0.0f;
  bool is_valid = true;
  for (int held = 0; held < kHeldChoices; ++held) {
    const int choice = held * kSimdgroupSize + lane;
    choices.experts[held] = -1;
    choices.scores[held] = 0.0f;
    if (choice >= args.choices) continue;
    const int expert = index_at(indices, kLongIndices, token * args.choices + choice, args.experts, -1);
    is_valid = is_valid && expert >= 0;
    if (expert < 0) continue;
    const float logit = float(logits[expert]);
    choices.experts[held] = expert;
    choices.scores[held] = kSigmoid ? sigmoid(logit) : softmax.score(logit);
    sum += choices.scores[held];
  }
  choices.sum = simdgroup_sum(sum);
  choices.is_valid = simd_all(is_valid);
  return choices;
}

template <typename T>
inline Softmax softmax_if_needed(device const T* logits, int experts, uint lane) {
  if (kSigmoid) return {0.0f, 1.0f};
  return softmax_of(logits, experts, lane);
}

// What a score is divided by to get its share of the weight.
inline float divisor_of(LaneChoices choices, float epsilon) { return kRenormalize ? choices.sum + epsilon : 1.0f; }

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kTokenThreads)]] void selected_router_weights(
    constant SelectedRouterArgs& args [[buffer(kArgsBuffer)]], device const T* logits [[buffer(kLogitsBuffer)]],
    device const void* indices [[buffer(kIndicesBuffer)]], device float* weights [[buffer(kWeightsBuffer)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const long token = long(group) * kTokens + simdgroup;
  if (token >= args.tokens) return;
  device const T* row = logits + token * args.experts;
  const Softmax softmax = softmax_if_needed(row, args.experts, lane);
  const LaneChoices choices = choices_of(args, row, indices, token, softmax, lane);
  const float divisor = divisor_of(choices, args.renormalize_epsilon);
  for (int held = 0; held < kHeldChoices; ++held) {
    const int choice = held * kSimdgroupSize + lane;
    const float weight = choices.scores[held] / divisor * args.scale;
    if (choice < args.choices) weights[token * args.choices + choice] = choices.is_valid ? weight : NAN;
  }
}

// What a simdgroup keeps of its token.
struct TokenTerms {
  int experts[kMostSelected];
  float terms[kMostSelected];  // each choice's score times the score's gradient
};

// Writes the terms and returns their sum. With shares n = score / divisor, a term is scale n (grad - sum(grad n)) if
// weights are renormalised, else scale n grad: without a division by a sum that may be very small.
inline float write_terms(constant SelectedRouterArgs& args, LaneChoices choices, device const float* grads, uint lane,
                         threadgroup TokenTerms& token) {
  const float divisor = divisor_of(choices, args.renormalize_epsilon);
  float shares[kHeldChoices];
  float upstream[kHeldChoices];
  float product = 0.0f;
  for (int held = 0; held < kHeldChoices; ++held) {
    const int choice = held * kSimdgroupSize + lane;
    shares[held] = choices.scores[held] / divisor;
    upstream[held] = choice < args.choices ? grads[choice] : 0.0f;
    product += upstream[held] * shares[held];
  }
  const float projection = kRenormalize ? simdgroup_sum(product) : 0.0f;
  float sum = 0.0f;
  for (int held = 0; held < kHeldChoices; ++held) {
    const int choice = held * kSimdgroupSize + lane;
    const float term = args.scale * shares[held] * (upstream[held] - projection);
    token.experts[choice] = choices.experts[held];
    token.terms[choice] = term;
    sum += choice < args.choices ? term : 0.0f;
  }
  return simdgroup_sum(sum);
}

// The terms of an expert, which may have been chosen more than once.
inline float term_of(threadgroup const TokenTerms& token, int choices, int expert) {
  float term = 0.0f;
  for (int choice = 0; choice < choices; ++choice)
    if (token.experts[choice] == expert) term += token.terms[choice];
  return term;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kTokenThreads)]] void selected_router_backward(
    constant SelectedRouterArgs& args [[buffer(kArgsBuffer)]], device const T* logits [[buffer(kLogitsBuffer)]],
    device const void* indices [[buffer(kIndicesBuffer)]], device const float* grads [[buffer(kGradWeightsBuffer)]],
    device T* grad_logits [[buffer(kGradLogitsBuffer)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup TokenTerms of_tokens[kTokens];
  const long token = long(group) * kTokens + simdgroup;
  if (token >= args.tokens) return;
  threadgroup TokenTerms& terms = of_tokens[simdgroup];
  device const T* row = logits + token * args.experts;
  const Softmax softmax = softmax_if_needed(row, args.experts, lane);
  const LaneChoices choices = choices_of(args, row, indices, token, softmax, lane);
  const float sum = write_terms(args, choices, grads + token * args.choices, lane, terms);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int expert = lane; expert < args.experts; expert += kSimdgroupSize) {
    const float logit = float(row[expert]);
    float grad = term_of(terms, args.choices, expert);
    grad = kSigmoid ? grad * sigmoid(-logit) : grad - softmax.score(logit) * sum;
    grad_logits[token * args.experts + expert] = T(choices.is_valid ? grad : NAN);
  }
}

INSTANCE(selected_router_weights_float, selected_router_weights, float)
INSTANCE(selected_router_weights_half, selected_router_weights, half)
INSTANCE(selected_router_weights_bfloat, selected_router_weights, bfloat)
INSTANCE(selected_router_backward_float, selected_router_backward, float)
INSTANCE(selected_router_backward_half, selected_router_backward, half)
INSTANCE(selected_router_backward_bfloat, selected_router_backward, bfloat)
