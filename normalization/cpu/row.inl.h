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
};

inline constexpr float kLargest = 0x1.fffffep127f;

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
  const auto statistics = measure(RowScale{1.0f, epsilon});
  if (statistics.usable()) return statistics;
  const float factor = power_of_two_scale(row, width);
  return measure(RowScale{factor, epsilon * factor * factor});
}

// 1 / sqrt(mean_square) in float32, finite for every mean_square > 0.
inline float reciprocal_root(double mean_square) {
  const double root = 1.0 / __builtin_sqrt(mean_square);
  return root > kLargest ? kLargest : static_cast<float>(root);
}

}  // namespace rudnn::RUDNN_ISA
