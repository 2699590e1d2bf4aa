// Barriers, simdgroup functions and simdgroup matrices. All live lanes of a simdgroup must call these together.
#pragma once

#include "../engine/simt.h"
#include "math.h"

namespace metal {

using simt::Site;
using simt::WarpCall;

enum class mem_flags { mem_none = 0, mem_threadgroup = 1, mem_device = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
// The flags say which memory is ordered, in the engine as in Metal.
SIMT_INLINE void threadgroup_barrier(mem_flags flags, Site at = simt::here()) {
  simt::block_barrier(static_cast<simt::Fence>(flags), "threadgroup_barrier", at);
}
SIMT_INLINE void simdgroup_barrier(mem_flags, Site at = simt::here()) {
  simt::warp_barrier(simt::live_lanes(), "simdgroup_barrier", at);
}

template <class Out, class In>
SIMT_INLINE Out collective(const In& in, simt::Combine combine, const char* name, Site at) {
  Out out;
  simt::warp_collective(simt::live_lanes(), &in, &out, combine, name, at);
  return out;
}

// Each lane receives the reduction over the lanes up to itself; kExclusive leaves itself out, kAll takes every lane.
enum class Scan { kAll, kInclusive, kExclusive };
template <class T, class Op, Scan kScan>
void combine_scan(const WarpCall& call) {
  T running{};
  bool first = true;
  call.for_each_lane([&](int lane) {
    if (kScan == Scan::kExclusive) call.out<T>(lane) = running;
    running = first ? call.in<T>(lane) : static_cast<T>(Op::apply(running, call.in<T>(lane)));
    if (kScan == Scan::kInclusive) call.out<T>(lane) = running;
    first = false;
  });
  if (kScan == Scan::kAll) call.for_each_lane([&](int lane) { call.out<T>(lane) = running; });
}
#define SIMT_REDUCTION(name, scan, expression)                                      \
  struct name##_op {                                                                \
    template <class T>                                                              \
    static auto apply(T a, T b) {                                                   \
      return expression;                                                            \
    }                                                                               \
  };                                                                                \
  template <class T>                                                                \
  SIMT_INLINE T name(T value, Site at = simt::here()) {                             \
    return collective<T>(value, combine_scan<T, name##_op, Scan::scan>, #name, at); \
  }
SIMT_REDUCTIONS(SIMT_REDUCTION)
#undef SIMT_REDUCTION
SIMT_INLINE bool simd_all(bool vote, Site at = simt::here()) { return simd_and<uint>(vote, at); }
SIMT_INLINE bool simd_any(bool vote, Site at = simt::here()) { return simd_or<uint>(vote, at); }

// A lane that names no live lane keeps its own value; Metal leaves it undefined.
#define SIMT_SHUFFLE(name, source)                                                                                    \
  template <class T>                                                                                                  \
  SIMT_INLINE T name(T value, ushort operand, Site at = simt::here()) {                                               \
    const int lane = simt::lane();                                                                                    \
    return collective<T>(simt::Shuffled<T>{value, (void(lane), source)}, simt::combine_shuffle<T, false>, #name, at); \
  }
SIMT_SHUFFLES(SIMT_SHUFFLE)
#undef SIMT_SHUFFLE

// Calls visit(k, row, column) for the elements that a lane holds: two neighbours, in the order of Apple's GPUs.
template <class F>
SIMT_INLINE void for_elements(int lane, F visit) {
  for (int k = 0; k < 2; ++k) visit(k, (lane >> 2 & 4) + (lane >> 1 & 3), (lane >> 2 & 2) * 2 + (lane & 1) * 2 + k);
}

template <class T, int kRows, int kColumns>
struct simdgroup_matrix {
  static_assert(kRows == 8 && kColumns == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for_elements(simt::lane(), [&](int k, int row, int column) { elements.v[k] = row == column ? diagonal : T(0); });
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int kRows, int kColumns>
inline simdgroup_matrix<T, kRows, kColumns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, kRows, kColumns> filled;
  filled.elements = vec<T, 2>(value, value);
  return filled;
}

// Calls visit(k, offset of element k of this lane) for a matrix at `origin` (column, row) of a stored one.
template <class F>
SIMT_INLINE void for_offsets(ulong stride, ulong2 origin, bool transpose, F visit) {
  for_elements(simt::lane(), [&](int k, int row, int column) {
    visit(k, (origin.y + (transpose ? column : row)) * stride + origin.x + (transpose ? row : column));
  });
}
template <class T, class U>
SIMT_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* from, ulong stride = 8, ulong2 origin = {0, 0},
                                bool transpose = false) {
  static_assert(is_same_v<T, U>, "simdgroup_load converts nothing");
  for_offsets(stride, origin, transpose, [&](int k, ulong offset) { m.elements.v[k] = from[offset]; });
}
template <class T, class U>
SIMT_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* to, ulong stride = 8, ulong2 origin = {0, 0},
                                 bool transpose = false) {
  static_assert(is_same_v<T, U>, "simdgroup_store converts nothing");
  for_offsets(stride, origin, transpose, [&](int k, ulong offset) { to[offset] = m.elements.v[k]; });
}

template <class A, class B, class C>
struct MatrixOperands {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};
template <class D, class A, class B, class C>
void combine_multiply(const WarpCall& call) {
  using Operands = MatrixOperands<A, B, C>;
  if (call.mask != ~0u) simt::fail("divergent-warp", "%s by a part of a simdgroup, mask %08x", call.name, call.mask);
  float a[8][8], b[8][8];
  call.for_each_lane([&](int lane) {
    for_elements(lane, [&](int k, int row, int column) {
      a[row][column] = static_cast<float>(call.in<Operands>(lane).a.v[k]);
      b[row][column] = static_cast<float>(call.in<Operands>(lane).b.v[k]);
    });
  });
  call.for_each_lane([&](int lane) {
    for_elements(lane, [&](int k, int row, int column) {
      float sum = static_cast<float>(call.in<Operands>(lane).c.v[k]);
      for (int i = 0; i < 8; ++i) sum += a[row][i] * b[i][column];
      call.out<vec<D, 2>>(lane).v[k] = static_cast<D>(sum);
    });
  });
}
// d = a b + c
template <class D, class A, class B, class C>
SIMT_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                               const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                               Site at = simt::here()) {
  const MatrixOperands<A, B, C> in{a.elements, b.elements, c.elements};
  d.elements = collective<vec<D, 2>>(in, combine_multiply<D, A, B, C>, "simdgroup_multiply_accumulate", at);
}

}  // namespace metal
