// What the norms share: adding a residual, and keeping a row's statistics inside float32's range. For the latter a row
// is multiplied by a power of two, 1 unless its squares overflow or vanish beside epsilon; a norm does not change with
// the scale of its input if epsilon scales along.

namespace rudnn::RUDNN_ISA {

// sum = a + b, rounded to T.
template <class T>
inline void add_rows(const T* a, const T* b, T* sum, int64_t width) {
  for_each_vector(width, [&](int64_t offset, auto lanes) {
    store(sum + offset, load(a + offset, lanes) + load(b + offset, lanes), lanes);
  });
}

// Whether a mean of squares plus epsilon has been computed without overflow, and is large enough that squares lost to
// underflow do not count. False for NaN.
inline bool in_range(double mean_square) { return mean_square >= 0x1p-100 && mean_square <= 0x1.fffffep127; }

// The power of two that brings the row's largest magnitude to [1, 2); 1 for a row of zeros or with inf.
template <class T>
inline float power_of_two_scale(const T* row, int64_t width) {
  const float largest = max_of(row, width, [](Vec x) { return abs(x); });
  if (!(largest > 0.0f && largest <= 0x1.fffffep127f)) return 1.0f;
  const int exponent = __builtin_ilogbf(largest);
  return __builtin_ldexpf(1.0f, exponent < -126 ? 126 : -exponent);
}

// 1 / sqrt(mean_square) in float32, finite for every mean_square > 0.
inline float reciprocal_root(double mean_square) {
  const double root = 1.0 / __builtin_sqrt(mean_square);
  return root > 0x1.fffffep127 ? 0x1.fffffep127f : static_cast<float>(root);
}

}  // namespace rudnn::RUDNN_ISA
