// Activations of one number and their slopes. Compiled as CUDA and as Metal.
#pragma once

#include "common/device_function.h"
#include "ops/activation.h"

namespace rudnn {

struct Activated {
  float value;
  float slope;
};

RUDNN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Slopes far from 0 are those at a limit, to which x is bounded so that nothing overflows. NaN stays NaN.
RUDNN_DEVICE float bounded(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

// The sigmoid of x > -88 and what is missing to 1, both right in relation to themselves.
struct Probability {
  float value;
  float complement;
};

RUDNN_DEVICE Probability probability_of(float x) {
  const float odds = exponential(-x);
  const float value = 1.0f / (1.0f + odds);
  return {value, odds * value};
}

RUDNN_DEVICE float silu(float x) { return x / (1.0f + exponential(-x)); }

RUDNN_DEVICE Activated silu_with_slope(float x) {
  const float near = bounded(x, 80.0f);
  const Probability probability = probability_of(near);
  return {silu(x), probability.value + near * probability.value * probability.complement};
}

// The standard normal distribution's share up to x, within 1e-7: 1/2 + x A(x^2) near 0, and tails of
// exp(-x^2 / 2) Q(1 / (1 + 0.3 |x|)), with polynomials A and Q fitted for the least relative error.
RUDNN_DEVICE float normal_share(float x) {
  const float distance = x < 0.0f ? -x : x;
  if (distance < 1.5f) {
    const float square = x * x;
    float a = 4.11555703e-07f;
    a = a * square - 8.71830161e-06f;
    a = a * square + 1.14356386e-04f;
    a = a * square - 1.18648843e-03f;
    a = a * square + 9.97324102e-03f;
    a = a * square - 6.64903373e-02f;
    a = a * square + 3.98942292e-01f;
    return 0.5f + x * a;
  }
  const float t = 1.0f / (1.0f + 0.3f * distance);
  float q = -3.97218242e-02f;
  q = q * t + 4.30116691e-02f;
  q = q * t + 7.10679516e-02f;
  q = q * t + 7.15512484e-02f;
  q = q * t + 1.15808621e-01f;
  q = q * t + 1.18125476e-01f;
  q = q * t + 1.19863778e-01f;
  q = q * t - 8.57930536e-06f;
  const float tail = exponential(-0.5f * x * x) * q;
  return x < 0.0f ? tail : 1.0f - tail;
}

RUDNN_DEVICE float gelu(float x) { return x * normal_share(x); }

RUDNN_DEVICE Activated gelu_with_slope(float x) {
  const float near = bounded(x, 14.0f);
  const float density = 0.398942280f * exponential(-0.5f * near * near);
  return {gelu(x), normal_share(near) + near * density};
}

// 0.5 (1 + tanh(u)) is sigmoid(2 u), which loses nothing to cancellation; this is 2 u.
RUDNN_DEVICE float gelu_tanh_argument(float x) { return 1.59576912f * (x + 0.044715f * x * x * x); }

RUDNN_DEVICE float gelu_tanh(float x) { return x * sigmoid(gelu_tanh_argument(x)); }

RUDNN_DEVICE Activated gelu_tanh_with_slope(float x) {
  const float near = bounded(x, 10.0f);
  const Probability share = probability_of(gelu_tanh_argument(near));
  const float argument_slope = 1.59576912f * (1.0f + 3.0f * 0.044715f * near * near);
  return {gelu_tanh(x), share.value + share.value * share.complement * near * argument_slope};
}

RUDNN_DEVICE float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return silu(x);
    case Activation::kGelu:
      return gelu(x);
    default:
      return gelu_tanh(x);
  }
}

RUDNN_DEVICE Activated activate_with_slope(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return silu_with_slope(x);
    case Activation::kGelu:
      return gelu_with_slope(x);
    default:
      return gelu_tanh_with_slope(x);
  }
}

// h = silu(gate) * up, and what a gradient of h is multiplied by for those of gate and up.
struct SwiGlu {
  float value;
  float gate_slope;
  float up_slope;
};

RUDNN_DEVICE float swiglu(float gate, float up) { return silu(gate) * up; }

RUDNN_DEVICE SwiGlu swiglu_with_slopes(float gate, float up) {
  const Activated activated = silu_with_slope(gate);
  return {activated.value * up, activated.slope * up, activated.value};
}

}  // namespace rudnn
