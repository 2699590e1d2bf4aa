// gated_activation and its gradient, one loop for every vector width.
#include "cpu/gated_activation.h"
#include "cpu/silu.inl.h"

namespace rudnn::RUDNN_ISA {
namespace {

// Coefficients from the lowest power on.
template <int kCount>
inline Vec polynomial(const float (&coefficients)[kCount], Vec x) {
  Vec value = broadcast(coefficients[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) value = fma(value, x, broadcast(coefficients[i]));
  return value;
}

// The share of the normal distribution below x, right in relation to itself for negative x too. With z = |x| / sqrt(2)
// the two minimax polynomials are erf(z) / z in z^2 up to 1, relatively right to 1.2e-9, and erfc(z) exp(z^2) / t in
// t = 1 / (z + 1.5) beyond, to 1.6e-8.
inline Vec normal_cdf(Vec x) {
  static constexpr float kCentre[] = {1.12837916573f,    -0.376126258241f,   0.112835851479f,  -0.0268538119193f,
                                      0.00518832767908f, -0.00080101937267f, 7.85386208982e-5f};
  static constexpr float kTail[] = {0.5642151794f, 0.8450895552f, 1.010750472f, 0.3834857427f,
                                    1.074557024f,  -8.174549449f, 10.86165896f, -4.78871807f};
  const Vec half = broadcast(0.5f);
  const Vec one = broadcast(1.0f);
  const Vec z = x * broadcast(0.707106781f);
  const Vec square = z * z;
  const Vec centre = fma(half * z, polynomial(kCentre, square), half);
  const Vec t = divide(one, abs(z) + broadcast(1.5f));
  const Vec beyond = half * exp(-square) * t * polynomial(kTail, t);
  const Vec tail = where_less(x, broadcast(0.0f), beyond, one - beyond);
  return where_less(square, one, centre, tail);
}

// An activation and its derivative, which far from 0 has its value at the limit to which x is clamped.
struct Gelu {
  static Vec value(Vec x) { return x * normal_cdf(x); }
  static Vec slope(Vec x) {
    const Vec bounded = clamp(x, 14.0f);
    const Vec density = broadcast(0.398942280f) * exp(broadcast(-0.5f) * bounded * bounded);
    return fma(bounded, density, normal_cdf(bounded));
  }
};

// (1 + tanh(u)) / 2 = sigmoid(2 u) for u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float kLinear = 1.59576912f;   // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.0713548163f;  // times 0.044715

  static Vec twice_u(Vec x) { return x * fma(x * x, broadcast(kCubic), broadcast(kLinear)); }
  static Vec value(Vec x) { return x * sigmoid(twice_u(x)); }
  static Vec slope(Vec x) {
    const Vec bounded = clamp(x, 10.0f);
    const Probability probability(twice_u(bounded));
    const Vec inner = fma(bounded * bounded, broadcast(3 * kCubic), broadcast(kLinear));
    return fma(bounded * probability.value * probability.complement, inner, probability.value);
  }
};

template <class Function, class T>
[[gnu::flatten]] void forward(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gated = static_cast<const T*>(args.input) + row * 2 * width;
    const T* factor = gated + width;
    T* output = static_cast<T*>(args.output) + row * width;
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      store(output + offset, Function::value(load(gated + offset, lanes)) * load(factor + offset, lanes), lanes);
    });
  }
}

template <class Function, class T>
[[gnu::flatten]] void backward(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gated = static_cast<const T*>(args.input) + row * 2 * width;
    const T* factor = gated + width;
    const T* grad = static_cast<const T*>(args.grad) + row * width;
    T* grad_gated = static_cast<T*>(args.grad_input) + row * 2 * width;
    T* grad_factor = grad_gated + width;
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      const Vec x = load(gated + offset, lanes);
      const Vec upstream = load(grad + offset, lanes);
      store(grad_gated + offset, upstream * load(factor + offset, lanes) * Function::slope(x), lanes);
      store(grad_factor + offset, upstream * Function::value(x), lanes);
    });
  }
}

// Calls visitor(function, element) with the types of the activation and of the elements.
template <class Visitor>
inline void visit(const GatedActivationArgs& args, Visitor&& visitor) {
  visit_dtype(args.dtype, [&](auto element) {
    switch (args.activation) {
      case Activation::kSilu:
        return visitor(Silu{}, element);
      case Activation::kGelu:
        return visitor(Gelu{}, element);
      case Activation::kGeluTanh:
        return visitor(GeluTanh{}, element);
    }
  });
}

}  // namespace

void gated_activation_rows(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  visit(args, [&](auto function, auto element) {
    forward<decltype(function), typename decltype(element)::type>(args, begin, end);
  });
}

void gated_activation_backward_rows(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  visit(args, [&](auto function, auto element) {
    backward<decltype(function), typename decltype(element)::type>(args, begin, end);
  });
}

}  // namespace rudnn::RUDNN_ISA
