// layer_norm and fused_add_layer_norm, one loop for every vector width.
#include "cpu/layer_norm.h"
#include "cpu/row.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

template <class T>
double sum_of(const T* row, int64_t width, float scale) {
  const Vec factor = broadcast(scale);
  return sum_vectors<1>(width, [&](int64_t offset, auto lanes,
                                   Vec* total) { total[0] = fma(load(row + offset, lanes), factor, total[0]); })
      .value[0];
}

// The mean in two parts, so that no digit of a deviation is lost to a large mean: x - mean = (x - centre) - correction.
struct Statistics {
  float centre;
  float correction;
  double variance;
};

// deviation_sums holds the sums of x - centre and of its square.
inline Statistics statistics_of(float centre, double deviation, double squared_deviation, int64_t width) {
  const double correction = deviation / width;
  const double variance = squared_deviation / width - correction * correction;
  return {centre, static_cast<float>(correction), variance < 0 ? 0 : variance};
}

template <class T>
Statistics statistics(const T* row, int64_t width, float scale) {
  const auto centre = static_cast<float>(sum_of(row, width, scale) / width);
  const Vec centres = broadcast(centre);
  const Vec factor = broadcast(scale);
  const Sums<2> sums = sum_vectors<2>(width, [&](int64_t offset, auto lanes, Vec* total) {
    const Vec deviation = keep(load(row + offset, lanes) * factor - centres, lanes, broadcast(0.0f));
    total[0] = total[0] + deviation;
    total[1] = fma(deviation, deviation, total[1]);
  });
  return statistics_of(centre, sums.value[0], sums.value[1], width);
}

template <class T>
[[gnu::flatten]] void forward(const LayerNormArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = args.width;
  const float* gamma = widen_row(args.gamma, args.gamma_dtype, width, scratch);
  const float* beta = args.beta ? widen_row(args.beta, args.beta_dtype, width, scratch + width) : nullptr;
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
    float scale = 1.0f;
    double epsilon = args.epsilon;
    Statistics stats = statistics(x, width, scale);
    if (!in_range(stats.variance + epsilon)) {
      scale = power_of_two_scale(x, width);
      epsilon = args.epsilon * scale * scale;
      stats = statistics(x, width, scale);
    }
    const Vec factor = broadcast(scale);
    const Vec centre = broadcast(stats.centre);
    const Vec correction = broadcast(stats.correction);
    const Vec root = broadcast(reciprocal_root(stats.variance + epsilon));
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      prefetch(next_input + offset);
      const Vec normalised = ((load(x + offset, lanes) * factor - centre) - correction) * root;
      const Vec shift = beta != nullptr ? load(beta + offset, lanes) : broadcast(0.0f);
      store(output + offset, fma(normalised, load(gamma + offset, lanes), shift), lanes);
    });
  }
}

// With n the normalised row and d = grad * gamma, the gradient of x is
// (d - mean(d) - n * mean(d * n)) / sqrt(variance(x) + epsilon).
template <class T>
[[gnu::flatten]] void backward(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* scratch,
                               float* grad_gamma, float* grad_beta) {
  const int64_t width = args.width;
  const float* gamma = widen_row(args.gamma, args.gamma_dtype, width, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.input) + row * width;
    const T* grad = static_cast<const T*>(args.grad) + row * width;
    const T* grad_sum = args.grad_sum ? static_cast<const T*>(args.grad_sum) + row * width : nullptr;
    T* grad_input = args.grad_input ? static_cast<T*>(args.grad_input) + row * width : nullptr;
    const int64_t to_next_row = row + 1 < end ? width : 0;

    // Sums of x - centre, its square, d, and d * (x - centre).
    const auto sums_around = [&](float centre, float scale) {
      const Vec centres = broadcast(centre);
      const Vec factor = broadcast(scale);
      return sum_vectors<4>(width, [&](int64_t offset, auto lanes, Vec* total) {
        const Vec deviation = keep(load(x + offset, lanes) * factor - centres, lanes, broadcast(0.0f));
        const Vec upstream = load(grad + offset, lanes) * load(gamma + offset, lanes);
        total[0] = total[0] + deviation;
        total[1] = fma(deviation, deviation, total[1]);
        total[2] = total[2] + upstream;
        total[3] = fma(upstream, deviation, total[3]);
      });
    };
    float scale = 1.0f;
    double epsilon = args.epsilon;
    auto centre_value = static_cast<float>(sum_of(x, width, scale) / width);
    Sums<4> sums = sums_around(centre_value, scale);
    Statistics stats = statistics_of(centre_value, sums.value[0], sums.value[1], width);
    if (!in_range(stats.variance + epsilon)) {
      scale = power_of_two_scale(x, width);
      epsilon = args.epsilon * scale * scale;
      centre_value = static_cast<float>(sum_of(x, width, scale) / width);
      sums = sums_around(centre_value, scale);
      stats = statistics_of(centre_value, sums.value[0], sums.value[1], width);
    }
    const float root_value = reciprocal_root(stats.variance + epsilon);
    const double product = sums.value[3] - stats.correction * sums.value[2];
    const Vec factor = broadcast(scale);
    const Vec centre = broadcast(stats.centre);
    const Vec correction = broadcast(stats.correction);
    const Vec root = broadcast(root_value);
    const Vec mean_upstream = broadcast(static_cast<float>(sums.value[2] / width));
    const Vec projection = broadcast(static_cast<float>(product * root_value / width));

    for_each_vector(width, [&](int64_t offset, auto lanes) {
      prefetch(x + to_next_row + offset);
      prefetch(grad + to_next_row + offset);
      const Vec normalised = ((load(x + offset, lanes) * factor - centre) - correction) * root;
      const Vec upstream = load(grad + offset, lanes);
      if (grad_gamma != nullptr) {
        store(grad_gamma + offset, fma(upstream, normalised, load(grad_gamma + offset, lanes)), lanes);
      }
      if (grad_beta != nullptr) store(grad_beta + offset, upstream + load(grad_beta + offset, lanes), lanes);
      if (grad_input != nullptr) {
        // Rounded as in the mean, so that a row of one element has a gradient of exactly 0.
        const Vec centred = upstream * load(gamma + offset, lanes) - mean_upstream;
        Vec gradient = fma(-normalised, projection, centred) * root * factor;
        if (grad_sum != nullptr) gradient = gradient + load(grad_sum + offset, lanes);
        store(grad_input + offset, gradient, lanes);
      }
    });
  }
}

}  // namespace

void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end, float* scratch) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, begin, end, scratch); });
}

void layer_norm_backward_rows(const LayerNormBackwardArgs& args, int64_t begin, int64_t end, float* scratch,
                              float* grad_gamma, float* grad_beta) {
  visit_dtype(args.dtype, [&](auto element) {
    backward<typename decltype(element)::type>(args, begin, end, scratch, grad_gamma, grad_beta);
  });
}

}  // namespace rudnn::RUDNN_ISA
