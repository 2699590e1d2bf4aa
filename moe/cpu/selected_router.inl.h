// selected_router_weights and its gradient, one loop for every vector width.
#include "cpu/selected_router.h"
#include "ops/limits.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Scores the logits of one row, and holds the row's chosen ones.
template <RouterScoring kScoring, class T>
class Row {
 public:
  Row(const SelectedRouterArgs& args, int64_t row)
      : logits_(static_cast<const T*>(args.logits) + row * args.experts), top_k_(args.top_k) {
    for (int64_t j = 0; j < top_k_; ++j) {
      indices_[j] = args.indices[row * top_k_ + j];
      valid_ = valid_ && indices_[j] >= 0 && indices_[j] < args.experts;
    }
    if (!valid_) return;
    if constexpr (kScoring == RouterScoring::kSoftmax) measure(args.experts);
    T chosen[kMostSelected];
    for (int64_t j = 0; j < top_k_; ++j) chosen[j] = logits_[indices_[j]];
    for_each_vector(top_k_, [&](int64_t offset, auto lanes) {
      store(scores_ + offset, score(load(chosen + offset, lanes)), lanes);
    });
    for (int64_t j = 0; j < top_k_; ++j) sum_ += scores_[j];
  }

  // Whether every index is in range; if not, nothing else is there.
  bool valid() const { return valid_; }
  int64_t index(int64_t j) const { return indices_[j]; }
  const T* logits() const { return logits_; }
  const float* scores() const { return scores_; }
  double sum() const { return sum_; }

  Vec score(Vec logit) const {
    if constexpr (kScoring == RouterScoring::kSigmoid) return sigmoid(logit);
    return exp(logit - largest_) * reciprocal_;
  }

  template <class Lanes>
  Vec score_at(int64_t offset, Lanes lanes) const {
    return score(load(logits_ + offset, lanes));
  }

 private:
  void measure(int64_t experts) {
    // NaN is left out of the maximum, and comes back in the sum.
    largest_ = broadcast(max_of(logits_, experts, [](Vec value) { return value; }));
    const double sum = sum_vectors<1>(experts, [&](int64_t offset, auto lanes, Vec* total) {
                         const Vec value = exp(load(logits_ + offset, lanes) - largest_);
                         total[0] = total[0] + keep(value, lanes, broadcast(0.0f));
                       }).value[0];
    reciprocal_ = broadcast(static_cast<float>(1.0 / sum));
  }

  const T* logits_;
  int64_t top_k_;
  int64_t indices_[kMostSelected];
  float scores_[kMostSelected];
  Vec largest_ = broadcast(0.0f);
  Vec reciprocal_ = broadcast(0.0f);
  double sum_ = 0;
  bool valid_ = true;
};

// float64 for the few chosen ones costs nothing beside the row.
inline double divisor_of(const SelectedRouterArgs& args, double sum) {
  return args.renormalize ? sum + static_cast<double>(kRenormalizeEpsilon) : 1.0;
}

template <RouterScoring kScoring, class T>
[[gnu::flatten]] void forward(const SelectedRouterArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const Row<kScoring, T> row(args, i);
    float* weights = args.weights + i * args.top_k;
    const double factor = row.valid() ? args.scale / divisor_of(args, row.sum()) : __builtin_nan("");
    for (int64_t j = 0; j < args.top_k; ++j) {
      weights[j] = row.valid() ? static_cast<float>(row.scores()[j] * factor) : __builtin_nanf("");
    }
  }
}

// With s the chosen scores and D = sum(s) + epsilon, a weight is scale * s / D. The gradient of a score is then
// scale / D * (grad - mean), mean = sum(grad * s) / D, and each occurrence of an expert adds its own.
template <RouterScoring kScoring, class T>
[[gnu::flatten]] void backward(const SelectedRouterArgs& args, int64_t begin, int64_t end, float* grad_scores) {
  for (int64_t i = begin; i < end; ++i) {
    const Row<kScoring, T> row(args, i);
    const float* grad = args.grad_weights + i * args.top_k;
    T* grad_logits = static_cast<T*>(args.grad_logits) + i * args.experts;
    if (!row.valid()) {
      for_each_vector(args.experts, [&](int64_t offset, auto lanes) {
        store(grad_logits + offset, broadcast(__builtin_nanf("")), lanes);
      });
      continue;
    }
    double product = 0;
    for (int64_t j = 0; j < args.top_k; ++j) product += static_cast<double>(grad[j]) * row.scores()[j];
    const double divisor = divisor_of(args, row.sum());
    const double mean = args.renormalize ? product / divisor : 0.0;
    for (int64_t j = 0; j < args.top_k; ++j) {
      grad_scores[row.index(j)] += static_cast<float>(args.scale / divisor * (grad[j] - mean));
    }
    if constexpr (kScoring == RouterScoring::kSoftmax) {
      // The sum over the chosen of s times its gradient; renormalised, sum(s) / D is 1 but for epsilon.
      const double projection =
          args.renormalize ? args.scale * mean * (1.0 - row.sum() / divisor) : args.scale * product;
      const Vec shift = broadcast(static_cast<float>(projection));
      for_each_vector(args.experts, [&](int64_t offset, auto lanes) {
        store(grad_logits + offset, row.score_at(offset, lanes) * (load(grad_scores + offset, lanes) - shift), lanes);
      });
    } else {
      for_each_vector(args.experts, [&](int64_t offset, auto lanes) {
        const Vec logit = load(row.logits() + offset, lanes);
        const Vec slope = sigmoid(logit) * sigmoid(broadcast(0.0f) - logit);
        store(grad_logits + offset, slope * load(grad_scores + offset, lanes), lanes);
      });
    }
    for (int64_t j = 0; j < args.top_k; ++j) grad_scores[row.index(j)] = 0.0f;
  }
}

template <RouterScoring kScoring>
struct ScoringTag {
  static constexpr RouterScoring value = kScoring;
};

// Calls visitor(ScoringTag<scoring>{}, TypeTag<T>{}) for logits of type T.
template <class Visitor>
inline void visit(const SelectedRouterArgs& args, Visitor&& visitor) {
  visit_dtype(args.dtype, [&](auto element) {
    if (args.scoring == RouterScoring::kSigmoid) {
      visitor(ScoringTag<RouterScoring::kSigmoid>{}, element);
    } else {
      visitor(ScoringTag<RouterScoring::kSoftmax>{}, element);
    }
  });
}

}  // namespace

void selected_router_rows(const SelectedRouterArgs& args, int64_t begin, int64_t end) {
  visit(args, [&](auto scoring, auto element) {
    forward<decltype(scoring)::value, typename decltype(element)::type>(args, begin, end);
  });
}

void selected_router_backward_rows(const SelectedRouterArgs& args, int64_t begin, int64_t end, float* grad_scores) {
  visit(args, [&](auto scoring, auto element) {
    backward<decltype(scoring)::value, typename decltype(element)::type>(args, begin, end, grad_scores);
  });
}

}  // namespace rudnn::RUDNN_ISA
