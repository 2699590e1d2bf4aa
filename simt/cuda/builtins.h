// CUDA C++ for a host compiler: keywords, built-in variables, launches and the intrinsics that have a name in CUDA. The
// types are NVIDIA's own (vector_types.h, cuda_fp16.h, cuda_bf16.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../engine/host.h"

// To a host compiler NVIDIA's headers define the other keywords as nothing.
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __shared__ SIMT_STATIC_SHARED
#define __constant__ static
#define __launch_bounds__(...)

#define threadIdx (simt::cuda::dim(simt::thread_index()))
#define blockIdx (simt::cuda::dim(simt::block_index()))
#define blockDim (simt::cuda::dim(simt::block_size()))
#define gridDim (simt::cuda::dim(simt::grid_size()))

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

namespace simt::cuda {

SIMT_INLINE uint3 dim(Dim3 d) { return {d.x, d.y, d.z}; }

template <class T>
SIMT_INLINE T shuffle(unsigned mask, T value, int source, const char* name, Site site) {
  const Shuffled<T> in{value, source};
  T out;
  warp_collective(mask, &in, &out, combine_shuffle<T, true>, name, site);
  return out;
}

inline void combine_ballot(const WarpCall& call) {
  unsigned votes = 0;
  call.for_each_lane([&](int lane) { votes |= unsigned{call.in<int>(lane) != 0} << lane; });
  call.for_each_lane([&](int lane) { call.out<unsigned>(lane) = votes; });
}

inline void combine_match(const WarpCall& call) {
  call.for_each_lane([&](int lane) {
    unsigned equal = 0;
    call.for_each_lane([&](int other) { equal |= unsigned{call.in<int>(lane) == call.in<int>(other)} << other; });
    call.out<unsigned>(lane) = equal;
  });
}

constexpr size_t kSharedLimit = 227 << 10;  // a block's opt-in limit on sm_90

template <class... Params>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Params... args) {
  const LaunchShape shape{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, kSharedLimit};
  run_grid_of(shape, reinterpret_cast<const void*>(kernel), [kernel, args...] { kernel(args...); });
}

}  // namespace simt::cuda

SIMT_INLINE void __syncthreads(simt::Site at = simt::here()) {
  simt::block_barrier(simt::kFenceAll, "__syncthreads", at);
}
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu, simt::Site at = simt::here()) {
  simt::warp_barrier(mask, "__syncwarp", at);
}
// `source` is computed from the lane and from the first and last lane of its group of `width`.
#define SIMT_SHUFFLE(name, Operand, source)                                                                   \
  template <class T>                                                                                          \
  SIMT_INLINE T name(unsigned mask, T value, Operand operand, int width = 32, simt::Site at = simt::here()) { \
    const int lane = simt::lane(), first = lane & ~(width - 1), last = lane | (width - 1);                    \
    const int by = static_cast<int>(operand);                                                                 \
    return simt::cuda::shuffle(mask, value, (void(first), void(last), source), #name, at);                    \
  }
SIMT_SHUFFLE(__shfl_sync, int, first | (by & (width - 1)))
SIMT_SHUFFLE(__shfl_xor_sync, int, (lane ^ by) > last ? lane : lane ^ by)
SIMT_SHUFFLE(__shfl_down_sync, unsigned, lane + by > last ? lane : lane + by)
SIMT_SHUFFLE(__shfl_up_sync, unsigned, lane - by < first ? lane : lane - by)
#undef SIMT_SHUFFLE
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int vote, simt::Site at = simt::here()) {
  unsigned votes;
  simt::warp_collective(mask, &vote, &votes, simt::cuda::combine_ballot, "__ballot_sync", at);
  return votes;
}
SIMT_INLINE int __any_sync(unsigned mask, int vote, simt::Site at = simt::here()) {
  return __ballot_sync(mask, vote, at) != 0;
}
SIMT_INLINE int __all_sync(unsigned mask, int vote, simt::Site at = simt::here()) {
  return __ballot_sync(mask, vote, at) == mask;
}
SIMT_INLINE unsigned __match_any_sync(unsigned mask, int value, simt::Site at = simt::here()) {
  unsigned equal;
  simt::warp_collective(mask, &value, &equal, simt::cuda::combine_match, "__match_any_sync", at);
  return equal;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

template <class T>
SIMT_INLINE T atomicAdd(T* address, std::common_type_t<T> value) {
  return simt::atomic_update(address, [&](T old) { return old + value; });
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
