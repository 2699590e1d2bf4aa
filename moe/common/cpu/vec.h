// What every width of vector has in common. Included by vec_generic.h, vec_avx2.h and vec_avx512.h inside their
// namespace rudnn::RUDNN_ISA, after they have defined
//
//   Vec                      kWidth float32 lanes, with + - * and unary -
//   Full, Partial{count}     which lanes take part: all, or the first 0 < count < kWidth
//   load(pointer, lanes)     widens to float32; lanes that do not take part are 0 and their memory is not touched
//   store(pointer, v, lanes) rounds to nearest even; lanes that do not take part are not written
//   keep(v, lanes, fill)     replaces the lanes that do not take part
//   broadcast, fma(a, b, c) = a * b + c, abs, divide
//   max(a, b)                b where either is NaN
//   where_less(a, b, x, y)   x where a < b, else y
//   reduce_add, reduce_max
//   Wide                     kWidth float64 lanes: wide_zero(), add(wide, v), reduce_add
//   transpose(vectors)       makes rows of the columns of kWidth vectors
//   pin(v)                   keeps the compiler from loading v from memory wherever it is used
//   round_to_integer, times_power_of_two(v, n) = v * 2^n for whole n, exact or rounded once
//
// Everything lives in the ISA's namespace and nothing from the standard library is instantiated here: the linker may
// keep any one copy of an inline function, and one compiled for AVX-512 must not be the one that every CPU runs.

// Calls body(offset, lanes) over [0, length) in vectors. Inline, since a body of a wider instruction set cannot be
// inlined into it.
template <class Body>
[[gnu::always_inline]] inline void for_each_vector(int64_t length, Body&& body) {
  int64_t offset = 0;
  for (; offset + kWidth <= length; offset += kWidth) body(offset, Full{});
  if (offset < length) body(offset, Partial{static_cast<int>(length - offset)});
}

template <int kCount>
struct Sums {
  double value[kCount];
};

// kCount sums over [0, length) in one pass: add(offset, lanes, totals) adds a vector to each of its kCount totals. Four
// vectors are summed in float32 and those sums in float64, so that the error grows neither with the length of a row,
// whose equal elements are all rounded to the same side, nor with an element beside which the others are small.
template <int kCount, class Add>
inline Sums<kCount> sum_vectors(int64_t length, Add&& add_vector) {
  Wide sums[kCount];
  for (auto& sum : sums) sum = wide_zero();
  Vec even[kCount];
  Vec odd[kCount];
  const auto clear = [&] {
    for (int k = 0; k < kCount; ++k) even[k] = odd[k] = broadcast(0.0f);
  };
  const auto flush = [&] {
    for (int k = 0; k < kCount; ++k) sums[k] = add(sums[k], even[k] + odd[k]);
  };
  int64_t offset = 0;
  for (; offset + 4 * kWidth <= length; offset += 4 * kWidth) {
    clear();
    add_vector(offset, Full{}, even);
    add_vector(offset + kWidth, Full{}, odd);
    add_vector(offset + 2 * kWidth, Full{}, even);
    add_vector(offset + 3 * kWidth, Full{}, odd);
    flush();
  }
  clear();
  for (; offset + kWidth <= length; offset += kWidth) add_vector(offset, Full{}, even);
  if (offset < length) add_vector(offset, Partial{static_cast<int>(length - offset)}, odd);
  flush();
  Sums<kCount> result;
  for (int k = 0; k < kCount; ++k) result.value[k] = reduce_add(sums[k]);
  return result;
}

// The largest map(x) of a row in float32, NaN left out; -inf for a row of nothing else.
template <class T, class Map>
inline float max_of(const T* row, int64_t length, Map&& map) {
  const Vec lowest = broadcast(-__builtin_inff());
  Vec even = lowest;
  Vec odd = lowest;
  int64_t offset = 0;
  for (; offset + 2 * kWidth <= length; offset += 2 * kWidth) {
    even = max(map(load(row + offset, Full{})), even);
    odd = max(map(load(row + offset + kWidth, Full{})), odd);
  }
  for_each_vector(length - offset, [&](int64_t rest, auto lanes) {
    even = max(keep(map(load(row + offset + rest, lanes)), lanes, lowest), even);
  });
  return reduce_max(max(even, odd));
}

// e^x with a relative error of 1.2e-7: x = n ln 2 + r with |r| <= ln(2) / 2, and the Taylor series of e^r to r^7. 0
// below -104, inf above 89, NaN for NaN; a denormal result is off by one unit at most.
inline Vec exp(Vec x) {
  const Vec bounded = -max(broadcast(-89.0f), -max(broadcast(-104.0f), x));
  const Vec n = round_to_integer(bounded * broadcast(1.44269504f));
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  Vec r = fma(n, broadcast(-0.693145752f), bounded);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Vec series = broadcast(1.0f / 5040);
  series = fma(series, r, broadcast(1.0f / 720));
  series = fma(series, r, broadcast(1.0f / 120));
  series = fma(series, r, broadcast(1.0f / 24));
  series = fma(series, r, broadcast(1.0f / 6));
  series = fma(series, r, broadcast(0.5f));
  series = fma(series, r, broadcast(1.0f));
  series = fma(series, r, broadcast(1.0f));
  return times_power_of_two(series, n);
}

inline Vec sigmoid(Vec x) { return divide(broadcast(1.0f), broadcast(1.0f) + exp(-x)); }
