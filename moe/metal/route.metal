// route: the experts of the largest softmax scores.
#include "metal/route_args.h"
#include "metal/router.h"

using namespace metal;
using namespace rudnn;

constant bool kRenormalize [[function_constant(kRenormalizeConstant)]];

// The scores of a lane's experts: lane, lane + 32, ... The first ones are kept, the others computed again each time.
template <typename T>
struct LaneScores {
  device const T* logits;
  Softmax softmax;
  int experts;
  uint lane;
  float held[kHeldScores];

  void load() {
    for (int slot = 0; slot < kHeldScores; ++slot) {
      const int expert = slot * kSimdgroupSize + lane;
      held[slot] = expert < experts ? softmax.score(float(logits[expert])) : 0.0f;
    }
  }

  // The first of them after `previous`.
  Ranked first_after(Ranked previous) const {
    Ranked best = after_all();
    for (int slot = 0; slot < kHeldScores; ++slot) {
      const int expert = slot * kSimdgroupSize + lane;
      if (expert < experts) best = earliest_after(previous, {rank_of(held[slot]), expert}, best);
    }
    for (int expert = kHeldScores * kSimdgroupSize + lane; expert < experts; expert += kSimdgroupSize)
      best = earliest_after(previous, {rank_of(softmax.score(float(logits[expert]))), expert}, best);
    return best;
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kTokenThreads)]] void route(
    constant RouteArgs& args [[buffer(kArgsBuffer)]], device const T* logits [[buffer(kLogitsBuffer)]],
    device int* indices [[buffer(kIndicesBuffer)]], device T* weights [[buffer(kWeightsBuffer)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const long token = long(group) * kTokens + simdgroup;
  if (token >= args.tokens) return;
  device const T* row = logits + token * args.experts;
  device int* chosen = indices + token * args.top_k;
  device T* factors = weights + token * args.top_k;
  const Softmax softmax = softmax_of(row, args.experts, lane);
  if (softmax.is_nan()) {
    for (int choice = lane; choice < args.top_k; choice += kSimdgroupSize) {
      chosen[choice] = choice;
      factors[choice] = T(NAN);
    }
    return;
  }

  LaneScores<T> scores = {row, softmax, args.experts, lane, {}};
  scores.load();
  Ranked previous = before_all();
  float sum = 0.0f;
  for (int choice = 0; choice < args.top_k; ++choice) {
    previous = first_of_simdgroup(scores.first_after(previous));
    if (choice % kSimdgroupSize == int(lane)) chosen[choice] = previous.id;
    sum += softmax.score(float(row[previous.id]));
  }
  // Each lane reads what it has written itself.
  for (int choice = lane; choice < args.top_k; choice += kSimdgroupSize) {
    const float score = softmax.score(float(row[chosen[choice]]));
    factors[choice] = T(kRenormalize ? score / (sum + args.renormalize_epsilon) : score);
  }
}

INSTANCE(route_float, route, float)
INSTANCE(route_half, route, half)
INSTANCE(route_bfloat, route, bfloat)
