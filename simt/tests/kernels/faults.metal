// Faults that the bench must find in shaders; kFault, a function constant, turns each of them on.
#include <metal_stdlib>
using namespace metal;

constant bool kFault [[function_constant(0)]];
constant constexpr uint kThreads = 64;

kernel void missing_barrier(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                            uint i [[thread_position_in_threadgroup]]) {
  threadgroup float tile[kThreads];
  tile[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float mirrored = tile[kThreads - 1 - i];  // at: missing_barrier
  if (!kFault) threadgroup_barrier(mem_flags::mem_threadgroup);
  tile[i] = 2.0f * mirrored;  // at: missing_barrier
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[i];
}

kernel void matrix_overwritten(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                               uint i [[thread_position_in_threadgroup]]) {
  threadgroup float tile[kThreads];
  tile[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 m;
  simdgroup_load(m, tile, 8);  // at: matrix_overwritten
  if (!kFault) threadgroup_barrier(mem_flags::mem_threadgroup);
  tile[i] = 0.0f;  // at: matrix_overwritten
  y[i] = m.thread_elements()[0];
}

kernel void weak_flags(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                       uint i [[thread_position_in_threadgroup]]) {
  y[i] = x[i];
  threadgroup_barrier(kFault ? mem_flags::mem_threadgroup : mem_flags::mem_device);
  const float mirrored = y[kThreads - 1 - i];  // at: weak_flags
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = mirrored;
}

kernel void divergent_barrier(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                              uint i [[thread_position_in_threadgroup]]) {
  if (kFault && i < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // at: divergent_barrier
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // at: divergent_barrier
  }
  y[i] = x[i];
}

kernel void out_of_bounds(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  y[i] = x[kFault ? i + 1024 : i];  // at: out_of_bounds
}

kernel void misaligned_vector(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) {
  device const float4* four = (device const float4*)(x + (kFault ? 1 : 0));
  y[i] = dot(four[i], float4(1.0f));  // at: misaligned_vector
}

kernel void past_threadgroup_memory(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                                    threadgroup float* tile [[threadgroup(1)]],
                                    uint i [[thread_position_in_threadgroup]]) {
  tile[kFault ? i + 4 : i] = x[i];  // at: past_threadgroup_memory
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[kFault ? i + 4 : i];
}

enum DemandingIndex : int { kOutputBuffer = 0, kStepConstant = 1 };
constant uint kStep [[function_constant(kStepConstant)]];

inline float stepped(uint i) { return float(i * kStep); }

// Launched right with a value for kStep of its type, 32 threads at most, and a buffer.
[[kernel, max_total_threads_per_threadgroup(32)]] void demanding(device float* y [[buffer(kOutputBuffer)]],
                                                                 uint i [[thread_index_in_threadgroup]]) {
  y[i] = stepped(i);
}
