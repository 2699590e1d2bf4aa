// float32 vectors of 4 lanes in the compiler's own vector type: SSE2 on any x86-64, NEON on any aarch64. Include first,
// before the code that uses it.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#define RUDNN_ISA generic

namespace rudnn::generic {

inline constexpr int kWidth = 4;

using Float4 = float __attribute__((vector_size(16)));
using Double2 = double __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));

struct Vec {
  Float4 value;
};

struct Wide {
  Double2 low, high;
};

struct Full {};
struct Partial {
  int count;
};

inline constexpr int count_of(Full) { return kWidth; }
inline constexpr int count_of(Partial lanes) { return lanes.count; }

inline Vec operator+(Vec a, Vec b) { return {a.value + b.value}; }
inline Vec operator-(Vec a, Vec b) { return {a.value - b.value}; }
inline Vec operator*(Vec a, Vec b) { return {a.value * b.value}; }
inline Vec operator-(Vec a) { return {-a.value}; }
inline Vec divide(Vec a, Vec b) { return {a.value / b.value}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.value * b.value + c.value}; }
inline Vec broadcast(float value) { return {Float4{value, value, value, value}}; }

inline Vec select(Int4 condition, Vec a, Vec b) {
  return {reinterpret_cast<Float4>((condition & reinterpret_cast<Int4>(a.value)) |
                                   (~condition & reinterpret_cast<Int4>(b.value)))};
}

inline Vec max(Vec a, Vec b) { return select(a.value > b.value, a, b); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return select(a.value < b.value, x, y); }
inline Vec abs(Vec a) { return {reinterpret_cast<Float4>(reinterpret_cast<Int4>(a.value) & 0x7fffffff)}; }
inline void pin(Vec&) {}
inline float reduce_add(Vec a) { return (a.value[0] + a.value[2]) + (a.value[1] + a.value[3]); }
inline float reduce_max(Vec a) {
  float largest = a.value[0];
  for (int lane = 1; lane < kWidth; ++lane) largest = a.value[lane] > largest ? a.value[lane] : largest;
  return largest;
}

inline void transpose(Vec (&vectors)[4]) {
  const Vec rows[4] = {vectors[0], vectors[1], vectors[2], vectors[3]};
  for (int i = 0; i < kWidth; ++i) {
    vectors[i].value = Float4{rows[0].value[i], rows[1].value[i], rows[2].value[i], rows[3].value[i]};
  }
}

inline Wide wide_zero() { return {Double2{0, 0}, Double2{0, 0}}; }

inline Wide add(Wide a, Vec b) {
  return {a.low + Double2{b.value[0], b.value[1]}, a.high + Double2{b.value[2], b.value[3]}};
}

inline double reduce_add(Wide a) {
  const Double2 sum = a.low + a.high;
  return sum[0] + sum[1];
}

// Adding 1.5 * 2^23 leaves no bits for a fraction. For |a| < 2^22.
inline Vec round_to_integer(Vec a) {
  const Vec shift = broadcast(12582912.0f);
  return (a + shift) - shift;
}

// In two factors, each a normal number for |n| <= 252, so that only the second product can round.
inline Vec times_power_of_two(Vec a, Vec n) {
  Int4 exponent;
  for (int lane = 0; lane < kWidth; ++lane) {
    // NaN converts to no integer.
    exponent[lane] = n.value[lane] == n.value[lane] ? static_cast<int32_t>(n.value[lane]) : 0;
  }
  const Int4 half = exponent >> 1;
  const Int4 rest = exponent - half;
  const Float4 first = reinterpret_cast<Float4>((half + 127) << 23);
  const Float4 second = reinterpret_cast<Float4>((rest + 127) << 23);
  return {a.value * first * second};
}

inline float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen(float element) { return element; }

inline float widen(bfloat16 element) { return bits_to_float(static_cast<uint32_t>(element.bits) << 16); }

inline float widen(float16 element) {
  const uint32_t sign = static_cast<uint32_t>(element.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(element.bits & 0x7fff) << 13;
  uint32_t bits;
  if (magnitude >= 0x0f800000) {  // inf and NaN: the exponent goes from 31 to 255
    bits = magnitude + (224u << 23);
  } else if (magnitude >= 0x00800000) {  // normal: the bias goes from 15 to 127
    bits = magnitude + (112u << 23);
  } else {  // denormal: 2^-14 with these bits behind it, less 2^-14
    bits = float_to_bits(bits_to_float(magnitude + (113u << 23)) - bits_to_float(113u << 23));
  }
  return bits_to_float(sign | bits);
}

inline void narrow(float value, float* element) { *element = value; }

inline void narrow(float value, bfloat16* element) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = value == value ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  element->bits = static_cast<uint16_t>(rounded >> 16);
}

inline void narrow(float value, float16* element) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // from 65520 on the nearest is inf
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the least normal number
    half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else {  // 0.5 has the spacing of the denormals, 2^-24
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  }
  element->bits = static_cast<uint16_t>(sign | half);
}

template <class T, class Lanes>
inline Vec load(const T* pointer, Lanes lanes) {
  Vec a = broadcast(0.0f);
  for (int lane = 0; lane < count_of(lanes); ++lane) a.value[lane] = widen(pointer[lane]);
  return a;
}

inline Vec load(const float* pointer, Full) {
  Vec a;
  __builtin_memcpy(&a, pointer, sizeof(a));
  return a;
}

template <class T, class Lanes>
inline void store(T* pointer, Vec a, Lanes lanes) {
  for (int lane = 0; lane < count_of(lanes); ++lane) narrow(a.value[lane], pointer + lane);
}

inline void store(float* pointer, Vec a, Full) { __builtin_memcpy(pointer, &a, sizeof(a)); }

inline Vec keep(Vec a, Full, Vec) { return a; }
inline Vec keep(Vec a, Partial lanes, Vec fill) { return select(Int4{0, 1, 2, 3} < lanes.count, a, fill); }

#include "common/cpu/vec.h"

}  // namespace rudnn::generic
