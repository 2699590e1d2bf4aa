// What the norms share: adding a residual, and keeping a row's statistics inside float32's range.

namespace rudnn::RUDNN_ISA {

// sum = a + b, rounded to T.
template <class T>
inline void add_rows(const T* a, const T* b, T* sum, int64_t width) {
  for_each_vector(width, [&](int64_t offset, auto lanes) {
    store(sum + offset, load(a + offset, lanes) + load(b + offset, lanes), lanes);
  });
}

// What a row is multiplied by before its statistics are taken, and the epsilon that goes with it: a norm does not
// change with the scale of its input if epsilon scales with the square.
struct RowScale {
  float factor;
  double epsilon;
  float share;  // of gradients in their sums, a power of two: 1, or less than 1 / width
};

inline constexpr float kLargest = 0x1.fffffep127f;
inline constexpr float kSmallestNormal = 0x1p-126f;

// Whether a mean of squares plus epsilon has been computed without overflow, and is large enough that squares lost to
// underflow do not count. False for NaN.
inline bool in_range(double mean_square) { return mean_square >= 0x1p-100 && mean_square <= kLargest; }

inline bool is_finite(double value) { return value - value == 0; }

// The power of two that brings the row's largest magnitude to [1, 4), or as near as a normal number can; 1 for a row of
// zeros or with inf.
template <class T>
inline float power_of_two_scale(const T* row, int64_t width) {
  const float largest = max_of(row, width, [](Vec x) { return abs(x); });
  if (!(largest > 0.0f && largest <= kLargest)) return 1.0f;
  const int exponent = __builtin_ilogbf(largest);
  return __builtin_ldexpf(1.0f, exponent < -126 ? 126 : exponent > 126 ? -126 : -exponent);
}

// The statistics of a row, from measure(RowScale): those of the row as it is, or scaled if those are not usable().
template <class T, class Measure>
inline auto measure_in_range(const T* row, int64_t width, double epsilon, Measure&& measure) {
  const auto statistics = measure(RowScale{1.0f, epsilon, 1.0f});
  if (statistics.usable()) return statistics;
  const float factor = power_of_two_scale(row, width);
  return measure(RowScale{factor, epsilon * factor * factor, __builtin_ldexpf(1.0f, -1 - __builtin_ilogb(width))});
}

// What a scaled row is multiplied by to normalise it, and in the backward the gradient, by both factors. The root and
// the scale can leave float32's range each on their own side where the variance is 0, though their product does not.
struct Roots {
  double root;
  float normalise;
  float gradient[2];
};

// In float32, the largest magnitudes in place of those beyond.
inline float clamped(double value) {
  return value > kLargest ? kLargest : value < -kLargest ? -kLargest : static_cast<float>(value);
}

// What the normalised row is multiplied by in the gradient, from the sum over the scaled row of its products with the
// gradient. What is finite stays so, though it may be multiplied by 0 then.
inline float projection_of(double product, double root, int64_t width) {
  return is_finite(product) ? clamped(product * root / width) : static_cast<float>(product);
}

// From the mean of squares, epsilon included, of a scaled row.
inline Roots roots_of(double mean_square, RowScale scale) {
  const double root = 1.0 / __builtin_sqrt(mean_square);
  const double both = root * scale.factor;
  if (root <= kLargest && both >= kSmallestNormal && both <= kLargest) {
    return {root, static_cast<float>(root), {static_cast<float>(both), 1.0f}};
  }
  if (root <= kLargest) return {root, static_cast<float>(root), {static_cast<float>(root), scale.factor}};
  return {root, clamped(root), {clamped(root * scale.factor), 1.0f}};
}

}  // namespace rudnn::RUDNN_ISA
