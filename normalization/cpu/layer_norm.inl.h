// layer_norm and fused_add_layer_norm, one loop for every vector width.
#include "cpu/layer_norm.h"
#include "cpu/row.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Of a row multiplied by scale.factor. The mean is in two parts, so that no digit of a deviation is lost to a large
// mean: x - mean = (x - centre) - correction.
struct LayerStatistics {
  RowScale scale;
  float centre;
  float correction;
  double variance;  // epsilon included
  // In the backward, with d the gradient that reaches the normalised row: the sums of d and of d * (x - mean).
  double upstream;
  double product;

  bool usable() const { return in_range(variance) && is_finite(product) && is_finite(upstream); }
};

// From the sums over the row of x - centre, its square, and the share of d and of d * (x - centre).
inline LayerStatistics statistics_from(RowScale scale, float centre, const Sums<4>& sums, int64_t width) {
  const double correction = sums.value[0] / width;
  const double variance = sums.value[1] / width - correction * correction;
  return {scale,
          centre,
          static_cast<float>(correction),
          (variance < 0 ? 0 : variance) + scale.epsilon,
          sums.value[2] / scale.share,
          (sums.value[3] - correction * sums.value[2]) / scale.share};
}

template <class T>
float mean_of(const T* row, int64_t width, Vec factor) {
  const Sums<1> sum = sum_vectors<1>(width, [&](int64_t offset, auto lanes, Vec* total) {
    total[0] = fma(load(row + offset, lanes), factor, total[0]);
  });
  return static_cast<float>(sum.value[0] / width);
}

template <class T>
[[gnu::flatten]] void forward(const LayerNormArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* input = static_cast<const T*>(args.input) + row * width;
    const T* next_input = row + 1 < end ? input + width : input;
    T* output = static_cast<T*>(args.output) + row * width;
    const T* x = input;
    if (args.residual != nullptr) {
      T* sum = static_cast<T*>(args.sum) + row * width;
      add_rows(input, static_cast<const T*>(args.residual) + row * width, sum, width);
      x = sum;
    }

    const LayerStatistics statistics = measure_in_range(x, width, args.epsilon, [&](RowScale scale) {
      const Vec factor = broadcast(scale.factor);
      const float centre = mean_of(x, width, factor);
      const Sums<2> sums = sum_vectors<2>(width, [&](int64_t offset, auto lanes, Vec* total) {
        const Vec scaled = load(x + offset, lanes) * factor;
        const Vec deviation = keep(scaled - broadcast(centre), lanes, broadcast(0.0f));
        total[0] = total[0] + deviation;
        total[1] = fma(deviation, deviation, total[1]);
      });
      return statistics_from(scale, centre, {{sums.value[0], sums.value[1], 0, 0}}, width);
    });
    const Vec factor = broadcast(statistics.scale.factor);
    const Vec centre = broadcast(statistics.centre);
    const Vec correction = broadcast(statistics.correction);
    const Vec root = broadcast(roots_of(statistics.variance, statistics.scale).normalise);

    for_each_vector(width, [&](int64_t offset, auto lanes) {
      __builtin_prefetch(next_input + offset);
      const Vec normalised = ((load(x + offset, lanes) * factor - centre) - correction) * root;
      const Vec shift = args.beta != nullptr ? load(args.beta + offset, lanes) : broadcast(0.0f);
      store(output + offset, fma(normalised, load(args.gamma + offset, lanes), shift), lanes);
    });
  }
}

// With n the normalised row and d = grad * gamma, the gradient of x is
// (d - mean(d) - n * mean(d * n)) / sqrt(variance(x) + epsilon).
template <class T>
[[gnu::flatten]] void backward(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma,
                               float* grad_beta) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.input) + row * width;
    const T* grad = static_cast<const T*>(args.grad) + row * width;
    const T* grad_sum = args.grad_sum ? static_cast<const T*>(args.grad_sum) + row * width : nullptr;
    T* grad_input = args.grad_input ? static_cast<T*>(args.grad_input) + row * width : nullptr;
    const int64_t to_next_row = row + 1 < end ? width : 0;

    const LayerStatistics statistics = measure_in_range(x, width, args.epsilon, [&](RowScale scale) {
      const Vec factor = broadcast(scale.factor);
      const Vec share = broadcast(scale.share);
      const float centre = mean_of(x, width, factor);
      const Sums<4> sums = sum_vectors<4>(width, [&](int64_t offset, auto lanes, Vec* total) {
        const Vec scaled = load(x + offset, lanes) * factor;
        const Vec deviation = keep(scaled - broadcast(centre), lanes, broadcast(0.0f));
        const Vec upstream = load(grad + offset, lanes) * load(args.gamma + offset, lanes) * share;
        total[0] = total[0] + deviation;
        total[1] = fma(deviation, deviation, total[1]);
        total[2] = total[2] + upstream;
        total[3] = fma(upstream, deviation, total[3]);
      });
      return statistics_from(scale, centre, sums, width);
    });
    const Roots roots = roots_of(statistics.variance, statistics.scale);
    const Vec factor = broadcast(statistics.scale.factor);
    const Vec centre = broadcast(statistics.centre);
    const Vec correction = broadcast(statistics.correction);
    const Vec root = broadcast(roots.normalise);
    const Vec gradient_root = broadcast(roots.gradient[0]);
    const Vec gradient_factor = broadcast(roots.gradient[1]);
    const Vec mean_upstream = broadcast(static_cast<float>(statistics.upstream / width));
    const Vec projection = broadcast(projection_of(statistics.product, roots.root, width));

    for_each_vector(width, [&](int64_t offset, auto lanes) {
      __builtin_prefetch(x + to_next_row + offset);
      __builtin_prefetch(grad + to_next_row + offset);
      const Vec normalised = ((load(x + offset, lanes) * factor - centre) - correction) * root;
      const Vec upstream = load(grad + offset, lanes);
      if (grad_gamma != nullptr) {
        store(grad_gamma + offset, fma(upstream, normalised, load(grad_gamma + offset, lanes)), lanes);
      }
      if (grad_beta != nullptr) store(grad_beta + offset, upstream + load(grad_beta + offset, lanes), lanes);
      if (grad_input != nullptr) {
        // Rounded as in the mean, so that a row of one element has a gradient of exactly 0.
        const Vec centred = upstream * load(args.gamma + offset, lanes) - mean_upstream;
        Vec gradient = fma(-normalised, projection, centred) * gradient_root * gradient_factor;
        if (grad_sum != nullptr) gradient = gradient + load(grad_sum + offset, lanes);
        store(grad_input + offset, gradient, lanes);
      }
    });
  }
}

}  // namespace

void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, begin, end); });
}

void layer_norm_backward_rows(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma,
                              float* grad_beta) {
  visit_dtype(args.dtype, [&](auto element) {
    backward<typename decltype(element)::type>(args, begin, end, grad_gamma, grad_beta);
  });
}

}  // namespace rudnn::RUDNN_ISA
