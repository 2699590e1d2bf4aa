// rms_norm, rms_norm_gated and fused_add_rms_norm, one loop for every vector width.
#include "cpu/rms_norm.h"
#include "cpu/row.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

struct Activation {
  Vec value;
  Vec slope;
};

inline Activation activate(GateActivation activation, Vec z) {
  const Vec probability = sigmoid(z);
  const Vec complement = broadcast(1.0f) - probability;
  if (activation == GateActivation::kSigmoid) return {probability, probability * complement};
  const Vec silu = z * probability;
  return {silu, fma(silu, complement, probability)};
}

// Of a row multiplied by scale.factor.
struct RmsStatistics {
  RowScale scale;
  double mean_square;  // epsilon included
  double product;      // in the backward, the sum over the row of x times the gradient that reaches it

  bool usable() const { return in_range(mean_square) && is_finite(product); }
};

template <bool kGated, class T>
[[gnu::flatten]] void forward(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  const Vec gamma_offset = broadcast(args.gamma_offset);
  for (int64_t row = begin; row < end; ++row) {
    const T* input = static_cast<const T*>(args.input) + row * width;
    const T* next_input = row + 1 < end ? input + width : input;
    const T* gate = kGated ? static_cast<const T*>(args.gate) + row * width : nullptr;
    T* output = static_cast<T*>(args.output) + row * width;
    const T* x = input;
    if (args.residual != nullptr) {
      T* sum = static_cast<T*>(args.sum) + row * width;
      add_rows(input, static_cast<const T*>(args.residual) + row * width, sum, width);
      x = sum;
    }

    const RmsStatistics statistics = measure_in_range(x, width, args.epsilon, [&](RowScale scale) {
      const Vec factor = broadcast(scale.factor);
      const Sums<1> squares = sum_vectors<1>(width, [&](int64_t offset, auto lanes, Vec* total) {
        const Vec scaled = load(x + offset, lanes) * factor;
        total[0] = fma(scaled, scaled, total[0]);
      });
      return RmsStatistics{scale, squares.value[0] / width + scale.epsilon, 0};
    });
    const Vec factor = broadcast(statistics.scale.factor);
    const Vec root = broadcast(roots_of(statistics.mean_square, statistics.scale).normalise);

    for_each_vector(width, [&](int64_t offset, auto lanes) {
      __builtin_prefetch(next_input + offset);
      const Vec weight = load(args.gamma + offset, lanes) + gamma_offset;
      Vec y = load(x + offset, lanes) * factor * root * weight;
      if constexpr (kGated) y = y * activate(args.activation, load(gate + offset, lanes)).value;
      store(output + offset, y, lanes);
    });
  }
}

// With n = x / sqrt(mean(x^2) + epsilon) and d = grad * weight [* activation(gate)], the gradient of x is
// (d - n * mean(d * n)) / sqrt(mean(x^2) + epsilon).
template <bool kGated, class T>
[[gnu::flatten]] void backward(const RmsNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma) {
  const int64_t width = args.width;
  const Vec gamma_offset = broadcast(args.gamma_offset);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.input) + row * width;
    const T* grad = static_cast<const T*>(args.grad) + row * width;
    const T* gate = kGated ? static_cast<const T*>(args.gate) + row * width : nullptr;
    const T* grad_sum = args.grad_sum ? static_cast<const T*>(args.grad_sum) + row * width : nullptr;
    T* grad_input = args.grad_input ? static_cast<T*>(args.grad_input) + row * width : nullptr;
    T* grad_gate = args.grad_gate ? static_cast<T*>(args.grad_gate) + row * width : nullptr;
    const int64_t to_next_row = row + 1 < end ? width : 0;

    const RmsStatistics statistics = measure_in_range(x, width, args.epsilon, [&](RowScale scale) {
      const Vec factor = broadcast(scale.factor);
      const Vec share = broadcast(scale.share);
      const Sums<2> sums = sum_vectors<2>(width, [&](int64_t offset, auto lanes, Vec* total) {
        const Vec scaled = load(x + offset, lanes) * factor;
        const Vec weight = load(args.gamma + offset, lanes) + gamma_offset;
        Vec upstream = load(grad + offset, lanes) * weight;
        if constexpr (kGated) upstream = upstream * activate(args.activation, load(gate + offset, lanes)).value;
        total[0] = fma(scaled, scaled, total[0]);
        total[1] = fma(upstream * share, scaled, total[1]);
      });
      return RmsStatistics{scale, sums.value[0] / width + scale.epsilon, sums.value[1] / scale.share};
    });
    const Roots roots = roots_of(statistics.mean_square, statistics.scale);
    const Vec factor = broadcast(statistics.scale.factor);
    const Vec root = broadcast(roots.normalise);
    const Vec gradient_root = broadcast(roots.gradient[0]);
    const Vec gradient_factor = broadcast(roots.gradient[1]);
    const Vec projection = broadcast(projection_of(statistics.product, roots.root, width));

    for_each_vector(width, [&](int64_t offset, auto lanes) {
      __builtin_prefetch(x + to_next_row + offset);
      __builtin_prefetch(grad + to_next_row + offset);
      const Vec normalised = load(x + offset, lanes) * factor * root;
      const Vec weight = load(args.gamma + offset, lanes) + gamma_offset;
      Vec upstream = load(grad + offset, lanes);
      if constexpr (kGated) {
        const Activation activation = activate(args.activation, load(gate + offset, lanes));
        if (grad_gate != nullptr) {
          store(grad_gate + offset, upstream * normalised * weight * activation.slope, lanes);
        }
        upstream = upstream * activation.value;
      }
      if (grad_gamma != nullptr) {
        store(grad_gamma + offset, fma(upstream, normalised, load(grad_gamma + offset, lanes)), lanes);
      }
      if (grad_input != nullptr) {
        Vec gradient = fma(-normalised, projection, upstream * weight) * gradient_root * gradient_factor;
        if (grad_sum != nullptr) gradient = gradient + load(grad_sum + offset, lanes);
        store(grad_input + offset, gradient, lanes);
      }
    });
  }
}

}  // namespace

void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    args.gate != nullptr ? forward<true, T>(args, begin, end) : forward<false, T>(args, begin, end);
  });
}

void rms_norm_backward_rows(const RmsNormBackwardArgs& args, int64_t begin, int64_t end, float* grad_gamma) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    args.gate != nullptr ? backward<true, T>(args, begin, end, grad_gamma)
                         : backward<false, T>(args, begin, end, grad_gamma);
  });
}

}  // namespace rudnn::RUDNN_ISA
