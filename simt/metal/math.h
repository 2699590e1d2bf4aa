// Mathematics of Metal for float, half and vectors of them. The fast and precise functions are the same here.
#pragma once

#include <cmath>

#include "vector.h"

namespace metal {

using std::isfinite;
namespace fast = metal;
namespace precise = metal;

inline float inverse_sqrt(float x) { return 1.0f / ::sqrtf(x); }
#define SIMT_MATH(name, function)                                                         \
  inline float name(float x) { return function(x); }                                      \
  inline half name(half x) { return static_cast<half>(function(static_cast<float>(x))); } \
  template <class T, int N>                                                               \
  inline vec<T, N> name(vec<T, N> a) {                                                    \
    for (T& element : a.v) element = name(element);                                       \
    return a;                                                                             \
  }
SIMT_MATH_FUNCTIONS(SIMT_MATH)
#undef SIMT_MATH

#define SIMT_EXTREME(name, condition)                          \
  template <class T, class = std::enable_if_t<is_scalar_v<T>>> \
  inline T name(T a, T b) {                                    \
    return condition ? b : a;                                  \
  }                                                            \
  template <class T, int N>                                    \
  inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {            \
    for (int i = 0; i < N; ++i) a.v[i] = name(a.v[i], b.v[i]); \
    return a;                                                  \
  }
SIMT_EXTREME(max, a < b)
SIMT_EXTREME(min, b < a)
SIMT_EXTREME(fmax, a < b || a != a)  // NaN is left out
SIMT_EXTREME(fmin, b < a || a != a)
#undef SIMT_EXTREME
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
template <int N>
inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  for (int i = 0; i < N; ++i) a.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; ++i) sum += a.v[i] * b.v[i];
  return sum;
}

}  // namespace metal
