// The activation silu, for any vector width.
#pragma once

namespace rudnn::RUDNN_ISA {
namespace {

// x, or the nearest number in [-limit, limit].
inline Vec clamp(Vec x, float limit) { return -max(broadcast(-limit), -max(broadcast(-limit), x)); }

// The sigmoid of x > -88 and what is missing to 1, both right in relation to themselves.
struct Probability {
  explicit Probability(Vec x) {
    const Vec odds = exp(-x);
    value = divide(broadcast(1.0f), broadcast(1.0f) + odds);
    complement = odds * value;
  }

  Vec value;
  Vec complement;
};

// x * sigmoid(x) and its derivative, which far from 0 has its value at the limit to which x is clamped.
struct Silu {
  static Vec value(Vec x) { return x * sigmoid(x); }
  static Vec slope(Vec x) {
    const Vec bounded = clamp(x, 80.0f);
    const Probability probability(bounded);
    return fma(bounded * probability.value, probability.complement, probability.value);
  }
};

}  // namespace
}  // namespace rudnn::RUDNN_ISA
