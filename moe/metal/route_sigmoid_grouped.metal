// route_sigmoid_grouped: the experts of the largest corrected sigmoid scores in the best groups.
#include "metal/route_sigmoid_grouped_args.h"
#include "metal/router.h"

using namespace metal;
using namespace rudnn;

constant bool kHasBias [[function_constant(kHasBiasConstant)]];
constant bool kGroupTopTwo [[function_constant(kGroupTopTwoConstant)]];
constant bool kRenormalize [[function_constant(kRenormalizeConstant)]];

// The score of a group by the corrected scores of its experts.
inline float group_score(threadgroup const float* corrected, int size) {
  Ranked first = after_all();
  Ranked second = after_all();
  for (int expert = 0; expert < size; ++expert) {
    const Ranked candidate = {rank_of(corrected[expert]), expert};
    if (precedes(candidate, first)) {
      second = first;
      first = candidate;
    } else if (precedes(candidate, second)) {
      second = candidate;
    }
  }
  return kGroupTopTwo ? corrected[first.id] + corrected[second.id] : corrected[first.id];
}

// What a simdgroup keeps of its token.
struct TokenScores {
  float corrected[kMostGroupedExperts];
  uint group_ranks[kMostGroups];
  bool is_kept[kMostGroups];
};

// Writes the corrected scores, and says whether a logit is NaN.
template <typename T>
inline bool correct_scores(device const T* logits, device const float* bias, int experts, uint lane,
                           threadgroup TokenScores& scores) {
  bool has_nan = false;
  for (int expert = lane; expert < experts; expert += kSimdgroupSize) {
    const float score = sigmoid(float(logits[expert]));
    has_nan = has_nan || score != score;
    scores.corrected[expert] = kHasBias ? score + bias[expert] : score;
  }
  return simd_any(has_nan);
}

inline void select_groups(int groups, int size, int selected, uint lane, threadgroup TokenScores& scores) {
  for (int group = lane; group < groups; group += kSimdgroupSize) {
    scores.group_ranks[group] = rank_of(group_score(scores.corrected + group * size, size));
    scores.is_kept[group] = false;
  }
  Ranked previous = before_all();
  for (int choice = 0; choice < selected; ++choice) {
    Ranked best = after_all();
    for (int group = lane; group < groups; group += kSimdgroupSize)
      best = earliest_after(previous, {scores.group_ranks[group], group}, best);
    previous = first_of_simdgroup(best);
    if (previous.id % kSimdgroupSize == int(lane)) scores.is_kept[previous.id] = true;
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kTokenThreads)]] void route_sigmoid_grouped(
    constant RouteSigmoidGroupedArgs& args [[buffer(kArgsBuffer)]], device const T* logits [[buffer(kLogitsBuffer)]],
    device const float* bias [[buffer(kBiasBuffer), function_constant(kHasBias)]],
    device int* indices [[buffer(kIndicesBuffer)]], device T* weights [[buffer(kWeightsBuffer)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup TokenScores of_tokens[kTokens];
  const long token = long(group) * kTokens + simdgroup;
  if (token >= args.tokens) return;
  threadgroup TokenScores& scores = of_tokens[simdgroup];
  device const T* row = logits + token * args.experts;
  device int* chosen = indices + token * args.top_k;
  const int size = args.experts / args.groups;

  const bool has_nan = correct_scores(row, bias, args.experts, lane, scores);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  select_groups(args.groups, size, args.selected_groups, lane, scores);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  uint kept = 0;  // a bit for each of the lane's experts
  for (int expert = lane; expert < args.experts; expert += kSimdgroupSize)
    if (scores.is_kept[expert / size]) kept |= 1u << (expert / kSimdgroupSize);
  Ranked previous = before_all();
  float sum = 0.0f;
  for (int choice = 0; choice < args.top_k; ++choice) {
    Ranked best = after_all();
    for (int expert = lane; expert < args.experts; expert += kSimdgroupSize) {
      if (kept >> (expert / kSimdgroupSize) & 1)
        best = earliest_after(previous, {rank_of(scores.corrected[expert]), expert}, best);
    }
    previous = first_of_simdgroup(best);
    if (choice % kSimdgroupSize == int(lane)) chosen[choice] = previous.id;
    sum += sigmoid(float(row[previous.id]));
  }
  // Each lane reads what it has written itself.
  for (int choice = lane; choice < args.top_k; choice += kSimdgroupSize) {
    float weight = sigmoid(float(row[chosen[choice]]));
    if (kRenormalize) weight = weight / (sum + args.renormalize_epsilon);
    weights[token * args.top_k + choice] = T(has_nan ? NAN : weight * args.scale);
  }
}

INSTANCE(route_sigmoid_grouped_float, route_sigmoid_grouped, float)
INSTANCE(route_sigmoid_grouped_half, route_sigmoid_grouped, half)
INSTANCE(route_sigmoid_grouped_bfloat, route_sigmoid_grouped, bfloat)
