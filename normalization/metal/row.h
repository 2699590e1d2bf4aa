// How a row is shared out among threads, and what they do with it together. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/device_function.h"
#include "common/metal/instance.h"
#include "common/metal/simdgroup.h"
#include "common/metal/vectors.h"
#include "metal/row_limits.h"
#include "ops/norm_args.h"
#include "ops/row_scale.h"

namespace rudnn {

// The threads of a row have its elements in vectors of kVector: thread t the vectors t, t + threads, ... Each keeps its
// first kHeld vectors; what longer rows have beyond them it reads again each time. A simdgroup has a row, several of
// them a threadgroup; or else the whole threadgroup has one.
template <int vector, int held, bool simdgroup_row>
struct RowShape {
  static constant constexpr int kVector = vector;
  static constant constexpr int kHeld = held;
  static constant constexpr bool kSimdgroupRow = simdgroup_row;
  using Floats = typename VectorOf<float, vector>::type;
};

// A thread among those of its row. Its rows are `row`, `row + row_step`, ...
struct Team {
  uint index;  // of the thread in the team
  uint threads;
  long row;
  long row_step;
  uint lane;
  uint simdgroup;
  uint simdgroups;              // of the threadgroup
  threadgroup float4* partial;  // [kMostSimdgroups]
};

template <typename Shape>
inline Team team_of(uint group, uint groups, uint index, uint threads, uint lane, uint simdgroup,
                    threadgroup float4* partial) {
  const uint simdgroups = threads / uint(kSimdgroupSize);
  if (Shape::kSimdgroupRow)
    return {lane,
            uint(kSimdgroupSize),
            long(group) * simdgroups + simdgroup,
            long(groups) * simdgroups,
            lane,
            simdgroup,
            simdgroups,
            partial};
  return {index, threads, long(group), long(groups), lane, simdgroup, simdgroups, partial};
}

// Where one of a thread's vectors is: in a slot, if it is held, and at an offset of the row.
struct Place {
  int slot;
  bool held;
  long offset;
};

template <typename Shape>
inline Place place_of(Team team, long chunk, int slot) {
  return {slot, chunk == 0, chunk + (long(slot) * team.threads + team.index) * Shape::kVector};
}
template <typename Shape>
inline long chunk_of(Team team) {
  return long(team.threads) * (Shape::kHeld * Shape::kVector);
}

// Runs the statement that follows for each of the thread's vectors of a row, whose Place is `at`. kVector divides the
// width. The inner loop is unrolled, so that slots are known and what is held stays in registers.
// clang-format off
#define FOR_EACH_VECTOR(at, Shape, team, width)                                 \
  for (long chunk = 0; chunk < (width); chunk += chunk_of<Shape>(team))         \
    _Pragma("unroll") for (int slot = 0; slot < Shape::kHeld; ++slot)           \
      if (const Place at = place_of<Shape>(team, chunk, slot); at.offset < (width))
// clang-format on

// A parameter of a norm: [width], float32 or of the rows' dtype.
template <typename Shape, typename T>
inline typename Shape::Floats load_parameter(device const void* parameter, bool is_float, long offset) {
  if (is_float) return load_floats<Shape>(static_cast<device const float*>(parameter) + offset);
  return load_floats<Shape>(static_cast<device const T*>(parameter) + offset);
}

// The thread's share of a row.
template <typename T, typename Shape>
struct Row {
  using Floats = typename Shape::Floats;
  using Vector = typename VectorOf<T, Shape::kVector>::type;

  device const T* elements;
  Vector held[Shape::kHeld];

  void load(device const T* row, Team team, long width) {
    elements = row;
    FOR_EACH_VECTOR(at, Shape, team, width) {
      if (at.held) held[at.slot] = load_vector<Shape>(row + at.offset);
    }
  }

  // Becomes a + b, rounded, and writes it to `sum`.
  void load_sum(device const T* a, device const T* b, device T* sum, Team team, long width) {
    elements = sum;
    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Vector result = Vector(load_floats<Shape>(a + at.offset) + load_floats<Shape>(b + at.offset));
      *reinterpret_cast<device Vector*>(sum + at.offset) = result;
      if (at.held) held[at.slot] = result;
    }
  }

  Floats get(Place at) const {
    if (!at.held) return load_floats<Shape>(elements + at.offset);
    const Vector values = held[at.slot];
    return Floats(values);
  }
};

// Over the elements of a vector.
inline float total(float x) { return x; }
inline float total(float4 x) { return (x.x + x.y) + (x.z + x.w); }
inline float largest(float x) { return x; }
inline float largest(float4 x) { return precise::fmax(precise::fmax(x.x, x.y), precise::fmax(x.z, x.w)); }

// Over the threads of a row, in a fixed order; all of them call and receive the result. In a row of more than a
// simdgroup this takes two barriers of the threadgroup. V is float or a vector of floats.
template <typename Shape, typename V>
inline V row_sum(V value, Team team) {
  value = simdgroup_sum(value);
  if (Shape::kSimdgroupRow) return value;
  threadgroup V* partial = reinterpret_cast<threadgroup V*>(team.partial);
  if (team.lane == 0) partial[team.simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = V(0.0f);
  if (team.lane < team.simdgroups) value = partial[team.lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next call writes `partial` again
  return simdgroup_sum(value);
}
// No value is NaN.
template <typename Shape>
inline float row_max(float value, Team team) {
  value = simd_max(value);
  if (Shape::kSimdgroupRow) return value;
  threadgroup float* partial = reinterpret_cast<threadgroup float*>(team.partial);
  if (team.lane == 0) partial[team.simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.lane < team.simdgroups) value = partial[team.lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next call writes `partial` again
  return simd_max(value);
}

// The largest magnitude of a row, without NaN.
template <typename T, typename Shape>
inline float largest_magnitude(thread const Row<T, Shape>& row, Team team, long width) {
  typename Shape::Floats magnitude = typename Shape::Floats(0.0f);
  FOR_EACH_VECTOR(at, Shape, team, width) magnitude = precise::fmax(magnitude, fabs(row.get(at)));
  return row_max<Shape>(largest(magnitude), team);
}

// The statistics of a row and the roots that follow from them with epsilon: of the row as it is, or multiplied by a
// power of two where that leaves float32's range. measure(factor, share) gives those of the row times `factor`: an
// object with members mean_square, without epsilon, and usable(), which says whether its other sums are in range. Those
// it takes of terms multiplied by `share`, and divides by it what it gives.
template <typename T, typename Shape, typename Measure>
inline auto measure_in_range(thread const Row<T, Shape>& row, Team team, constant NormArgs& args,
                             thread RowRoots& roots, Measure measure) {
  const auto statistics = measure(1.0f, 1.0f);
  const float mean_square = statistics.mean_square + args.epsilon;
  roots = roots_of(mean_square);
  if (in_range(mean_square) && statistics.usable()) return statistics;
  const float factor = power_of_two_scale(largest_magnitude(row, team, args.width));
  const auto scaled = measure(factor, 1.0f / float(args.width));
  roots = roots_of_scaled(scaled.mean_square, factor, args.root_epsilon);
  return scaled;
}

}  // namespace rudnn

// The instances of a kernel for rows of T: each way to share out a row, by the name that launchers ask for. `vectors`
// and `elements` are what a thread keeps.
#define INSTANCES(function, T, vectors, elements)                                                   \
  INSTANCE(function##_##T##_x4_simdgroup, function, T, RowShape<kVectorElements, vectors, true>)    \
  INSTANCE(function##_##T##_x4_threadgroup, function, T, RowShape<kVectorElements, vectors, false>) \
  INSTANCE(function##_##T##_x1_simdgroup, function, T, RowShape<1, elements, true>)                 \
  INSTANCE(function##_##T##_x1_threadgroup, function, T, RowShape<1, elements, false>)
