// Scalar and vector types of Metal.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "names.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  explicit bfloat(float value) {  // to nearest, ties to even; NaN stays NaN
    const auto wide = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = static_cast<uint16_t>(is_nan ? (wide >> 16) | 64 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  explicit bfloat(T value) : bfloat(static_cast<float>(value)) {}
  operator float() const { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }
};

namespace metal {

template <class T>
constexpr bool is_scalar_v = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T, int N>
struct vec;

// A few components of a vector, by position. Copying it as a whole stays trivial, because it lives in a union.
template <class T, int N, int... I>
struct swizzle {
  T v[N];
  static constexpr int size = sizeof...(I);
  operator vec<T, size>() const { return vec<T, size>(v[I]...); }
  swizzle& operator=(const vec<T, size>& from) {
    int next = 0;
    ((v[I] = from.v[next++]), ...);
    return *this;
  }
};

// Either side may be a scalar, which becomes a vector.
#define SIMT_OPERATOR(N, op)                                               \
  friend vec operator op(vec a, vec b) {                                   \
    for (int i = 0; i < N; ++i) a.v[i] = static_cast<T>(a.v[i] op b.v[i]); \
    return a;                                                              \
  }                                                                        \
  vec& operator op## = (vec other) { return *this = *this op other; }

#define SIMT_VECTOR_MEMBERS(N)                                     \
  vec() = default;                                                 \
  vec(const vec&) = default;                                       \
  vec& operator=(const vec&) = default;                            \
  template <class U, class = std::enable_if_t<is_scalar_v<U>>>     \
  vec(U scalar) {                                                  \
    for (int i = 0; i < N; ++i) v[i] = static_cast<T>(scalar);     \
  }                                                                \
  template <class U>                                               \
  explicit vec(const vec<U, N>& other) {                           \
    for (int i = 0; i < N; ++i) v[i] = static_cast<T>(other.v[i]); \
  }                                                                \
  T& operator[](uint i) { return v[i]; }                           \
  const T& operator[](uint i) const { return v[i]; }               \
  friend vec operator-(vec a) { return T(0) - a; }                 \
  SIMT_OPERATOR(N, +)                                              \
  SIMT_OPERATOR(N, -)                                              \
  SIMT_OPERATOR(N, *)                                              \
  SIMT_OPERATOR(N, /)

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
  SIMT_VECTOR_MEMBERS(2)
  vec(T a, T b) : v{a, b} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
    swizzle<T, 3, 0, 1> xy;
  };
  SIMT_VECTOR_MEMBERS(3)
  vec(T a, T b, T c) : v{a, b, c} {}
  vec(vec<T, 2> a, T c) : v{a.x, a.y, c} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    swizzle<T, 4, 0, 1> xy;
    swizzle<T, 4, 2, 3> zw;
  };
  SIMT_VECTOR_MEMBERS(4)
  vec(T a, T b, T c, T d) : v{a, b, c, d} {}
  vec(vec<T, 3> a, T d) : v{a.x, a.y, a.z, d} {}
  vec(vec<T, 2> a, vec<T, 2> b) : v{a.x, a.y, b.x, b.y} {}
};
#undef SIMT_VECTOR_MEMBERS
#undef SIMT_OPERATOR

#define SIMT_VECTOR_NAMES(type) \
  using type##2 = vec<type, 2>; \
  using type##3 = vec<type, 3>; \
  using type##4 = vec<type, 4>;
SIMT_VECTOR_TYPES(SIMT_VECTOR_NAMES)
#undef SIMT_VECTOR_NAMES

using std::is_same_v;

template <class To, class From>
inline To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

}  // namespace metal
