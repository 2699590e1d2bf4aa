// The one header that CUDA kernels include: element types, vector access, warp reductions, and the only inline PTX of
// the project. With RUDNN_SIMT defined the same source is host C++ and each wrapper calls its emulation in simt/cuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

#ifdef RUDNN_SIMT
#include <simt/cuda/builtins.h>
#include <simt/cuda/tensor_core.h>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif

namespace rudnn {

using Stream = cudaStream_t;

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Launch

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic shared memory of a block
  Stream stream = nullptr;
};

// The only way to start a kernel. Throws std::runtime_error if the launch is refused.
#ifdef RUDNN_SIMT
// Dynamic shared memory of the block as unsigned char*, aligned to 1024 bytes.
#define DYNAMIC_SHARED(name) unsigned char* name = simt::dynamic_shared()

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  simt::cuda::launch(kernel, config.grid, config.block, config.shared_bytes, static_cast<Params>(args)...);
}
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or an innocent call would report it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  if (config.shared_bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared_bytes)),
               "dynamic shared memory");
  cudaLaunchConfig_t native{};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.shared_bytes;
  native.stream = config.stream;
  check_cuda(cudaLaunchKernelEx(&native, kernel, static_cast<Params>(args)...), "kernel launch");
}
#endif

// Elements

// CUDA's types for the project's own, which hold the same bits, and back.
__device__ __forceinline__ __half to_native(float16 x) { return __half_raw{x.bits}; }
__device__ __forceinline__ __nv_bfloat16 to_native(bfloat16 x) { return __nv_bfloat16_raw{x.bits}; }
__device__ __forceinline__ float16 from_native(__half x) { return {static_cast<__half_raw>(x).x}; }
__device__ __forceinline__ bfloat16 from_native(__nv_bfloat16 x) { return {static_cast<__nv_bfloat16_raw>(x).x}; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(float16 x) { return __half2float(to_native(x)); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(to_native(x)); }

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ float16 from_float<float16>(float x) {
  return from_native(__float2half_rn(x));
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  return from_native(__float2bfloat16_rn(x));
}

// N neighbouring elements, moved by one instruction. N * sizeof(T) is 1, 2, 4, 8 or 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
  __device__ __forceinline__ T& operator[](int i) { return v[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

template <int kBytes>
struct VecBits;
template <>
struct VecBits<1> {
  using type = uint8_t;
};
template <>
struct VecBits<2> {
  using type = uint16_t;
};
template <>
struct VecBits<4> {
  using type = uint32_t;
};
template <>
struct VecBits<8> {
  using type = uint2;
};
template <>
struct VecBits<16> {
  using type = uint4;
};

// The address must be a multiple of the vector's size.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_vec(const T* address) {
  using Bits = typename VecBits<sizeof(T) * N>::type;
  Vec<T, N> out;
  *reinterpret_cast<Bits*>(&out) = *reinterpret_cast<const Bits*>(address);
  return out;
}
template <int N, class T>
__device__ __forceinline__ void store_vec(T* address, const Vec<T, N>& value) {
  using Bits = typename VecBits<sizeof(T) * N>::type;
  *reinterpret_cast<Bits*>(address) = *reinterpret_cast<const Bits*>(&value);
}

// kVector neighbouring elements, widened, in loads of at most 16 bytes.
template <int kVector, class T>
__device__ __forceinline__ void load_floats(float (&out)[kVector], const T* address) {
  constexpr int kPerLoad = kVector * sizeof(T) <= 16 ? kVector : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVector; i += kPerLoad) {
    const auto part = load_vec<kPerLoad>(address + i);
#pragma unroll
    for (int j = 0; j < kPerLoad; ++j) out[i + j] = to_float(part[j]);
  }
}

template <class T, int kVector>
__device__ __forceinline__ Vec<T, kVector> rounded_to(const float (&values)[kVector]) {
  Vec<T, kVector> out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) out[i] = from_float<T>(values[i]);
  return out;
}

// Rounded, in stores of at most 16 bytes.
template <class T, int kVector>
__device__ __forceinline__ void store_floats(T* address, const float (&values)[kVector]) {
  constexpr int kPerStore = kVector * sizeof(T) <= 16 ? kVector : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVector; i += kPerStore) {
    Vec<T, kPerStore> part;
#pragma unroll
    for (int j = 0; j < kPerStore; ++j) part[j] = from_float<T>(values[i + j]);
    store_vec(address + i, part);
  }
}

// Two elements in one register, the first in the low half: the unit of the mma fragments.
template <class T>
__device__ __forceinline__ uint32_t pack(T low, T high) {
  const Vec<T, 2> both{{low, high}};
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Warp reductions: every lane of the warp calls, every lane receives the result, which has the same bits in each. With
// fewer than 32 kLanes, a power of two, each group of so many neighbouring lanes has its own.

template <int kLanes = kWarpSize, class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int flip = kLanes / 2; flip; flip /= 2) value = op(value, __shfl_xor_sync(kFullMask, value, flip));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
  return warp_reduce(value, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float value) {
  return warp_reduce(value, [](float a, float b) { return fmaxf(a, b); });
}

#ifndef RUDNN_SIMT
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

// Named barriers 1 to 15 among `threads` threads, a multiple of 32. An arrival publishes without waiting.

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
#ifdef RUDNN_SIMT
  simt::named_barrier(id, threads, true, "named_barrier_sync");
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
#ifdef RUDNN_SIMT
  simt::named_barrier(id, threads, false, "named_barrier_arrive");
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Asynchronous copies global to shared, sm_80. A thread waits for its own copies; a barrier shows them to others.

// Copies kBytes (4, 8 or 16), or writes zeros if not `valid`; the global address is not read then.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef RUDNN_SIMT
  simt::copy_async(shared, global, kBytes, valid ? kBytes : 0);
#else
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef RUDNN_SIMT
  simt::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kGroups of the newest committed groups are unfinished.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
#ifdef RUDNN_SIMT
  simt::copy_async_wait(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// Tensor cores, sm_80. Every lane of the warp calls. Lane l has group g = l / 4 and pair t = 2 * (l % 4).

// D += A B with A (16, 16), B (16, 8), D (16, 8), T one of float16 and bfloat16, sums in float32:
//   a[0] = A[g][t, t + 1]   a[1] = A[g + 8][t, t + 1]   a[2] = A[g][t + 8, t + 9]   a[3] = A[g + 8][t + 8, t + 9]
//   b[0] = B[t, t + 1][g]   b[1] = B[t + 8, t + 9][g]
//   d[0], d[1] = D[g][t, t + 1]   d[2], d[3] = D[g + 8][t, t + 1]
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(sizeof(T) == 2, "mma_m16n8k16 multiplies float16 or bfloat16");
#ifdef RUDNN_SIMT
  simt::cuda::mma_m16n8k16<decltype(to_native(T{}))>(d, a, b);
#else
#define RUDNN_MMA(type)                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same<T, bfloat16>::value)
    RUDNN_MMA("bf16");
  else
    RUDNN_MMA("f16");
#undef RUDNN_MMA
#endif
}

// Loads kMatrices (1, 2 or 4) matrices of 8x8 16-bit elements from shared memory. Lane l gives the address of row
// l % 8 of matrix l / 8, 16-byte aligned; lanes past the last matrix give any valid address.
//   r[m] = M[g][t, t + 1], or M[t, t + 1][g] if kTranspose
template <int kMatrices, bool kTranspose = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[kMatrices], const void* row) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "ldmatrix loads 1, 2 or 4 matrices");
#ifdef RUDNN_SIMT
  simt::cuda::ldmatrix<kMatrices, kTranspose>(r, row);
#else
#define RUDNN_LDMATRIX(shape, registers, address, ...)                                                   \
  if constexpr (kTranspose)                                                                              \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".trans.shared.b16 {" registers "}, [" address "];" \
                 : __VA_ARGS__                                                                           \
                 : "r"(shared_address(row))                                                              \
                 : "memory");                                                                            \
  else                                                                                                   \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".shared.b16 {" registers "}, [" address "];"       \
                 : __VA_ARGS__                                                                           \
                 : "r"(shared_address(row))                                                              \
                 : "memory")
  if constexpr (kMatrices == 1) {
    RUDNN_LDMATRIX("x1", "%0", "%1", "=r"(r[0]));
  } else if constexpr (kMatrices == 2) {
    RUDNN_LDMATRIX("x2", "%0, %1", "%2", "=r"(r[0]), "=r"(r[1]));
  } else {
    RUDNN_LDMATRIX("x4", "%0, %1, %2, %3", "%4", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]));
  }
#undef RUDNN_LDMATRIX
#endif
}

// Barrier objects and bulk copies, sm_90. Code for older devices traps, so a kernel that uses them is launched only
// where they exist. A phase ends after `arrivals` arrivals and all announced bytes; parities alternate from 0.

#if !defined(RUDNN_SIMT) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define RUDNN_SM90(...) __trap()
#else
#define RUDNN_SM90(...) asm volatile(__VA_ARGS__)
#endif

// One thread initialises; mbarrier_fence_init and then __syncthreads show it to the block and to the copy engine.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
#ifdef RUDNN_SIMT
  simt::mbarrier_init(barrier, arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_fence_init() {
#ifndef RUDNN_SIMT
  RUDNN_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
#ifdef RUDNN_SIMT
  simt::mbarrier_arrive(barrier, 0);
#else
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
// Arrives and announces bytes that bulk copies will add to the phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
#ifdef RUDNN_SIMT
  simt::mbarrier_arrive(barrier, bytes);
#else
  RUDNN_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
             "r"(bytes) : "memory");
#endif
}
// Waits for the end of the phase of this parity; returns at once if it has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
#ifdef RUDNN_SIMT
  simt::mbarrier_wait(barrier, parity);
#else
  RUDNN_SM90(
      "{\n.reg .pred done;\nretry%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra retry%=;\n}" ::"r"(shared_address(barrier)),
      "r"(parity) : "memory");
#endif
}
// One thread copies `bytes`, a multiple of 16, between 16-byte aligned addresses, and reports them to the barrier.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier) {
#ifdef RUDNN_SIMT
  simt::bulk_copy(shared, global, bytes, barrier);
#else
  RUDNN_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                 shared_address(shared)),
             "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
#endif
}

#undef RUDNN_SM90

}  // namespace rudnn
