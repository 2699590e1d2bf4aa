// Keeping a row's statistics inside float32's range on devices without float64. Compiled as CUDA and as Metal.
//
// A norm does not change with the scale of its input if epsilon scales with the square, so a row whose squares overflow
// or vanish is multiplied by a power of two first. Its epsilon then joins as a root, which has room where its square
// has not.
#pragma once

#include "common/device_function.h"

namespace rudnn {

// 2^-100, and the smallest normal and the largest float32. Macros, since Metal wants an address space for constants.
#define RUDNN_SMALLEST_NORMAL 1.17549435e-38f
#define RUDNN_SMALLEST_MEAN 7.88860905e-31f
#define RUDNN_LARGEST 3.40282347e38f

// The largest magnitudes in place of those beyond.
RUDNN_DEVICE float clamped(float x) {
  return x > RUDNN_LARGEST ? RUDNN_LARGEST : x < -RUDNN_LARGEST ? -RUDNN_LARGEST : x;
}

// Whether a mean of squares plus epsilon has been computed without overflow, and is large enough that squares lost to
// underflow do not count. False for NaN.
RUDNN_DEVICE bool in_range(float mean_square) {
  return mean_square >= RUDNN_SMALLEST_MEAN && mean_square <= RUDNN_LARGEST;
}

// What the normalised row is multiplied by in the gradient: the mean of the gradient times the scaled row, times the
// row's root. The product of two finite numbers may leave the range though it is multiplied by 0 then.
RUDNN_DEVICE float projection_of(float product, float root) {
  return is_finite(product) ? clamped(product * root) : product;
}

// The power of two that brings a row's largest magnitude to [1, 4), or as near as a normal number can; 1 for a row of
// zeros or with infinity or NaN.
RUDNN_DEVICE float power_of_two_scale(float largest) {
  const int exponent = int(float_bits(largest) >> 23);
  if (!(largest > 0.0f) || exponent == 255) return 1.0f;
  const int inverse = 254 - exponent;
  return float_from_bits((inverse > 253 ? 253 : inverse < 1 ? 1 : inverse) << 23);
}

// What a row multiplied by `factor` is multiplied by to normalise it, and a gradient by both factors, which are two
// only where their product leaves the range of normal numbers.
struct RowRoots {
  float normalise;
  float gradient[2];
};

// From the mean of squares of a row as it is, epsilon included, which is in_range.
RUDNN_DEVICE RowRoots roots_of(float mean_square) {
  const float root = 1.0f / square_root(mean_square);
  return {root, {root, 1.0f}};
}

// From the mean of squares of a row multiplied by `factor`, a power of two, and the root of epsilon.
RUDNN_DEVICE RowRoots roots_of_scaled(float mean_square, float factor, float root_epsilon) {
  const float deviation = square_root(mean_square) / factor;
  const float larger = deviation < root_epsilon ? root_epsilon : deviation;
  const float smaller = deviation < root_epsilon ? deviation : root_epsilon;
  const float ratio = larger > 0.0f && larger <= RUDNN_LARGEST ? smaller / larger : 0.0f;
  const float magnitude = larger * square_root(1.0f + ratio * ratio);
  const float scaled = magnitude * factor;
  const float root = 1.0f / scaled;
  const float inverse = 1.0f / magnitude;
  const bool is_normal = inverse >= RUDNN_SMALLEST_NORMAL && inverse <= RUDNN_LARGEST;
  // Of a row of one value, what is normalised is 0, and only epsilon divides the gradient.
  if (root > RUDNN_LARGEST) return {RUDNN_LARGEST, {clamped(inverse), 1.0f}};
  if (is_normal) return {root, {inverse, 1.0f}};
  return {root, {root, factor}};
}

}  // namespace rudnn
