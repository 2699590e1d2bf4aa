// route_sigmoid_grouped, one loop for every vector width.
#include "cpu/route_sigmoid_grouped.h"
#include "cpu/selection.inl.h"
#include "ops/limits.h"
#include "ops/scoring.h"

namespace rudnn::RUDNN_ISA {
namespace {

struct Experts {
  float scores[kMostGroupedExperts];
  int32_t orders[selection_orders(kMostGroupedExperts)];  // of the corrected scores
  int32_t maxima[selection_blocks(kMostGroupedExperts)];
};

struct Groups {
  int32_t orders[selection_orders(kMostGroups)];  // of the groups' scores
  int32_t maxima[selection_blocks(kMostGroups)];
  bool selected[kMostGroups];
};

// Scores a row; returns whether it holds NaN.
template <class T>
inline bool score(const RouteSigmoidGroupedArgs& args, const T* logits, Experts& experts) {
  Vec sum = broadcast(0.0f);
  for_each_vector(args.experts, [&](int64_t offset, auto lanes) {
    const Vec value = sigmoid(load(logits + offset, lanes));
    store(experts.scores + offset, value, lanes);
    sum = sum + value;
  });
  for (int64_t i = 0; i < args.experts; ++i) {
    experts.orders[i] = order_of(args.bias != nullptr ? experts.scores[i] + args.bias[i] : experts.scores[i]);
  }
  const float total = reduce_add(sum);
  return total != total;
}

// The second largest of a group whose largest is given.
inline int32_t second_largest_of(const int32_t* orders, int32_t length, int32_t largest) {
  int32_t second = kTaken;
  int32_t equal = 0;
  for (int32_t i = 0; i < length; ++i) {
    const int32_t below = orders[i] < largest ? orders[i] : kTaken;
    second = below > second ? below : second;
    equal += orders[i] == largest ? 1 : 0;
  }
  return equal > 1 ? largest : second;
}

inline float group_score(const int32_t* orders, int32_t length, bool top_two) {
  const int32_t largest = largest_of(orders, length);
  if (!top_two) return value_of(largest);
  return value_of(largest) + value_of(second_largest_of(orders, length, largest));
}

// Takes the experts of all but the best groups out of the selection.
inline void limit_to_best_groups(const RouteSigmoidGroupedArgs& args, Experts& experts, Groups& groups) {
  const auto size = static_cast<int32_t>(args.experts / args.groups);
  for (int64_t group = 0; group < args.groups; ++group) {
    groups.orders[group] = order_of(group_score(experts.orders + group * size, size, args.group_top_two));
    groups.selected[group] = false;
  }
  Selection selection(groups.orders, groups.maxima, static_cast<int32_t>(args.groups));
  for (int64_t i = 0; i < args.selected_groups; ++i) groups.selected[selection.take()] = true;
  for (int64_t group = 0; group < args.groups; ++group) {
    if (groups.selected[group]) continue;
    for (int32_t i = 0; i < size; ++i) experts.orders[group * size + i] = kTaken;
  }
}

template <class T>
[[gnu::flatten]] void forward(const RouteSigmoidGroupedArgs& args, int64_t begin, int64_t end) {
  Experts experts;
  Groups groups;
  float chosen[kMostGroupedTopK];
  for (int64_t row = begin; row < end; ++row) {
    int32_t* indices = args.indices + row * args.top_k;
    T* weights = static_cast<T*>(args.weights) + row * args.top_k;
    const bool has_nan = score(args, static_cast<const T*>(args.logits) + row * args.experts, experts);
    if (args.selected_groups < args.groups) limit_to_best_groups(args, experts, groups);
    Selection selection(experts.orders, experts.maxima, static_cast<int32_t>(args.experts));
    float sum = 0;
    for (int64_t j = 0; j < args.top_k; ++j) {
      indices[j] = selection.take();
      chosen[j] = has_nan ? __builtin_nanf("") : experts.scores[indices[j]];
      sum += chosen[j];
    }
    const Vec divisor = broadcast(args.renormalize ? sum + kRenormalizeEpsilon : 1.0f);
    const Vec scale = broadcast(args.scale);
    for_each_vector(args.top_k, [&](int64_t offset, auto lanes) {
      store(weights + offset, divide(load(chosen + offset, lanes), divisor) * scale, lanes);
    });
  }
}

}  // namespace

void route_sigmoid_grouped_rows(const RouteSigmoidGroupedArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, begin, end); });
}

}  // namespace rudnn::RUDNN_ISA
