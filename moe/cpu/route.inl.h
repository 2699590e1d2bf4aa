// route, one loop for every vector width.
#include "cpu/route.h"
#include "cpu/selection.inl.h"
#include "ops/scoring.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Writes the softmax of a row; returns false, and leaves scores as they come, for one of which every score is NaN.
template <class T>
inline bool softmax(const T* logits, int64_t experts, float* scores) {
  const Vec largest = broadcast(max_of(logits, experts, [](Vec value) { return value; }));
  const double sum = sum_vectors<1>(experts, [&](int64_t offset, auto lanes, Vec* total) {
                       const Vec value = exp(load(logits + offset, lanes) - largest);
                       store(scores + offset, value, lanes);
                       total[0] = total[0] + keep(value, lanes, broadcast(0.0f));
                     }).value[0];
  const Vec reciprocal = broadcast(static_cast<float>(1.0 / sum));
  for_each_vector(experts, [&](int64_t offset, auto lanes) {
    store(scores + offset, load(scores + offset, lanes) * reciprocal, lanes);
  });
  return sum == sum;
}

// Chooses the largest scores; returns their sum.
inline float choose(const RouteArgs& args, const RouteScratch& scratch, int32_t* indices) {
  for (int64_t i = 0; i < args.experts; ++i) scratch.orders[i] = order_of(scratch.scores[i]);
  Selection selection(scratch.orders, scratch.maxima, static_cast<int32_t>(args.experts));
  float sum = 0;
  for (int64_t j = 0; j < args.top_k; ++j) {
    indices[j] = selection.take();
    scratch.chosen[j] = scratch.scores[indices[j]];
    sum += scratch.chosen[j];
  }
  return sum;
}

inline float choose_first(const RouteArgs& args, const RouteScratch& scratch, int32_t* indices) {
  for (int64_t j = 0; j < args.top_k; ++j) {
    indices[j] = static_cast<int32_t>(j);
    scratch.chosen[j] = __builtin_nanf("");
  }
  return __builtin_nanf("");
}

template <class T>
[[gnu::flatten]] void forward(const RouteArgs& args, const RouteScratch& scratch, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    int32_t* indices = args.indices + row * args.top_k;
    T* weights = static_cast<T*>(args.weights) + row * args.top_k;
    const bool ordered = softmax(static_cast<const T*>(args.logits) + row * args.experts, args.experts, scratch.scores);
    const float sum = ordered ? choose(args, scratch, indices) : choose_first(args, scratch, indices);
    const Vec divisor = broadcast(args.renormalize ? sum + kRenormalizeEpsilon : 1.0f);
    for_each_vector(args.top_k, [&](int64_t offset, auto lanes) {
      store(weights + offset, divide(load(scratch.chosen + offset, lanes), divisor), lanes);
    });
  }
}

}  // namespace

void route_rows(const RouteArgs& args, const RouteScratch& scratch, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, scratch, begin, end); });
}

}  // namespace rudnn::RUDNN_ISA
