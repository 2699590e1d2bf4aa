// What the norms measure of a row. Compiled as CUDA and as Metal.
#pragma once

#include "ops/row_scale.h"

namespace rudnn {

// Of a row multiplied by `factor`.
struct RmsStatistics {
  float factor;
  float mean_square;
  float product;  // in the backward, the mean over the row of x times the gradient that reaches it

  RUDNN_DEVICE bool usable() const { return is_finite(product); }
};

// Of a row multiplied by `factor`. The mean is in two parts, so that no digit of a deviation is lost to a large mean.
struct LayerStatistics {
  float factor;
  float centre;
  float correction;
  float mean_square;  // of the deviations: the variance
  // In the backward, with d the gradient that reaches the normalised row: the means of d and of d * (x - mean).
  float upstream;
  float product;

  RUDNN_DEVICE bool usable() const { return is_finite(product) && is_finite(upstream); }

  // x - mean of an element or a vector of them, scaled.
  template <typename V>
  RUDNN_DEVICE V deviation(V x) const {
    return (x * factor - centre) - correction;
  }
};

// Sums over a row of x - centre, its square, and share times d and d * (x - centre).
struct LayerSums {
  float deviations;
  float squares;
  float upstreams;
  float products;
};

RUDNN_DEVICE LayerStatistics statistics_from(float factor, float centre, LayerSums sums, float share, float width) {
  const float correction = sums.deviations / width;
  const float variance = sums.squares / width - correction * correction;
  const float upstream = sums.upstreams / (width * share);
  const float product = sums.products / (width * share) - correction * upstream;
  return {factor, centre, correction, variance < 0.0f ? 0.0f : variance, upstream, product};
}

}  // namespace rudnn
