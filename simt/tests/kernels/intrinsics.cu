// One kernel per intrinsic of device.cuh, for known-answer tests on the bench and for PTX probes with nvcc.
#include "common/cuda/device.cuh"
#include "simt/tests/kernels/entry.h"

using namespace rudnn;

template <class T>
__global__ void mma(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
  const int lane = threadIdx.x;
  uint32_t fa[4], fb[2];
  float fd[4];
  for (int i = 0; i < 4; ++i) fa[i] = a[4 * lane + i];
  for (int i = 0; i < 2; ++i) fb[i] = b[2 * lane + i];
  for (int i = 0; i < 4; ++i) fd[i] = c[4 * lane + i];
  mma_m16n8k16<T>(fd, fa, fb);
  for (int i = 0; i < 4; ++i) d[4 * lane + i] = fd[i];
}

// Matrices are stored one after the other, rows of 8 elements.
template <int kMatrices, bool kTranspose>
__global__ void load_matrix(uint32_t* out, const uint16_t* in) {
  __shared__ __align__(16) uint16_t tile[64 * kMatrices];
  const int lane = threadIdx.x;
  for (int i = lane; i < 64 * kMatrices; i += kWarpSize) tile[i] = in[i];
  __syncthreads();
  uint32_t r[kMatrices];
  ldmatrix<kMatrices, kTranspose>(r, tile + lane % (8 * kMatrices) * 8);
  for (int m = 0; m < kMatrices; ++m) out[kMatrices * lane + m] = r[m];
}

__global__ void shuffles(int* out) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(kFullMask, lane, 5);
  out[32 + lane] = __shfl_sync(kFullMask, lane, 5, 8);
  out[64 + lane] = __shfl_xor_sync(kFullMask, lane, 3);
  out[96 + lane] = __shfl_up_sync(kFullMask, lane, 2, 8);
  out[128 + lane] = __shfl_down_sync(kFullMask, lane, 2, 8);
  out[160 + lane] = static_cast<int>(__ballot_sync(kFullMask, lane % 3 == 0));
  out[192 + lane] = __any_sync(kFullMask, lane == 31) + 2 * __all_sync(kFullMask, lane < 31);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (lane < 16)
    out[224 + lane] = __shfl_xor_sync(half, lane, 15);
  else
    out[224 + lane] = __shfl_xor_sync(half, 100 + lane, 1);
}

__global__ void matches(int* out) {
  const int lane = threadIdx.x;
  out[lane] = static_cast<int>(__match_any_sync(kFullMask, lane % 5));
  out[32 + lane] = __popc(out[lane]);
  out[64 + lane] = __clz(lane);
}

__global__ void reductions(float* out, const float* in) {
  const int lane = threadIdx.x;
  out[lane] = warp_sum(in[lane]);
  out[32 + lane] = warp_max(in[lane]);
}

__global__ void indices(int* out) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = 1000 * block + thread;
}

// kBytes from each row of `in`, zeros in odd rows.
template <int kBytes>
__global__ void copy_async(unsigned char* out, const unsigned char* in) {
  DYNAMIC_SHARED(tile);
  const int lane = threadIdx.x;
  cp_async<kBytes>(tile + lane * kBytes, in + lane * kBytes, lane % 2 == 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < kBytes; ++i) out[lane * kBytes + i] = tile[lane * kBytes + i];
}

// Three tiles through one stage, so that both parities are waited for.
__global__ void copy_bulk(float* out, const float* in) {
  __shared__ __align__(128) float tile[kWarpSize];
  __shared__ uint64_t full;
  const int lane = threadIdx.x;
  if (lane == 0) mbarrier_init(&full, 1);
  mbarrier_fence_init();
  __syncthreads();
  for (int i = 0; i < 3; ++i) {
    if (lane == 0) {
      mbarrier_arrive_expect(&full, sizeof tile);
      bulk_copy(tile, in + i * kWarpSize, sizeof tile, &full);
    }
    mbarrier_wait(&full, i % 2);
    out[i * kWarpSize + lane] = tile[kWarpSize - 1 - lane];
    __syncthreads();
  }
}

// Every thread arrives twice, and waits for both phases.
__global__ void arrivals(int* out) {
  __shared__ uint64_t barrier;
  __shared__ int values[64];
  if (threadIdx.x == 0) mbarrier_init(&barrier, blockDim.x);
  mbarrier_fence_init();
  __syncthreads();
  int seen = threadIdx.x;
  for (int phase = 0; phase < 2; ++phase) {
    values[threadIdx.x] = seen;
    mbarrier_arrive(&barrier);
    mbarrier_wait(&barrier, phase);
    seen = values[63 - threadIdx.x] + 1;
    __syncthreads();
  }
  out[threadIdx.x] = seen;
}

// Warp 0 produces for warp 1, then warps 1 and 2 meet; warp 3 takes no part.
__global__ void named_barriers(int* out) {
  __shared__ int values[kWarpSize], doubled[kWarpSize];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (warp == 0) {
    values[lane] = 100 + lane;
    named_barrier_arrive(1, 2 * kWarpSize);
  } else if (warp == 1) {
    named_barrier_sync(1, 2 * kWarpSize);
    doubled[lane] = 2 * values[31 - lane];
    named_barrier_sync(2, 2 * kWarpSize);
  } else if (warp == 2) {
    named_barrier_sync(2, 2 * kWarpSize);
    out[lane] = doubled[lane];
  }
}

template <class T, int N>
__global__ void vectors(T* out, const T* in) {
  const int i = N * threadIdx.x;
  Vec<T, N> v = load_vec<N>(in + i);
  const T first = v[0];
  v[0] = v[N - 1];
  v[N - 1] = first;
  store_vec(out + i, v);
}

template <class T>
__global__ void round_trip(float* back, uint32_t* packed, const float* in) {
  const int i = threadIdx.x;
  const T value = from_float<T>(in[i]);
  back[i] = to_float(value);
  packed[i] = pack(value, from_float<T>(1.0f));
}

__global__ void math(float* out, const float* in) {
  const int i = threadIdx.x;
  out[i] = rsqrtf(in[i]);
  out[32 + i] = __expf(in[i]);
}

__global__ void atomics(int* out) {
  if (atomicAdd(out, 1) == 0) out[1] = 7;
}

ENTRY(run_mma, int64_t bf16, float* d, const uint32_t* a, const uint32_t* b, const float* c) {
  ENTRY_BODY(launch(bf16 ? mma<bfloat16> : mma<float16>, {1, 32}, d, a, b, c));
}
ENTRY(run_load_matrix, int64_t matrices, int64_t transpose, uint32_t* out, const uint16_t* in) {
  auto kernel = matrices == 1   ? (transpose ? load_matrix<1, true> : load_matrix<1, false>)
                : matrices == 2 ? (transpose ? load_matrix<2, true> : load_matrix<2, false>)
                                : (transpose ? load_matrix<4, true> : load_matrix<4, false>);
  ENTRY_BODY(launch(kernel, {1, 32}, out, in));
}
ENTRY(run_shuffles, int* out) { ENTRY_BODY(launch(shuffles, {1, 32}, out)); }
ENTRY(run_matches, int* out) { ENTRY_BODY(launch(matches, {1, 32}, out)); }
ENTRY(run_reductions, float* out, const float* in) { ENTRY_BODY(launch(reductions, {1, 32}, out, in)); }
ENTRY(run_indices, int* out) { ENTRY_BODY(launch(indices, {{2, 3, 2}, {4, 2, 5}}, out)); }
ENTRY(run_copy_async, int64_t bytes, unsigned char* out, const unsigned char* in) {
  auto kernel = bytes == 4 ? copy_async<4> : bytes == 8 ? copy_async<8> : copy_async<16>;
  ENTRY_BODY(launch(kernel, {1, 32, static_cast<size_t>(32 * bytes)}, out, in));
}
ENTRY(run_copy_bulk, float* out, const float* in) { ENTRY_BODY(launch(copy_bulk, {1, 32}, out, in)); }
ENTRY(run_arrivals, int* out) { ENTRY_BODY(launch(arrivals, {1, 64}, out)); }
ENTRY(run_named_barriers, int* out) { ENTRY_BODY(launch(named_barriers, {1, 128}, out)); }
ENTRY(run_vectors_f32x4, float* out, const float* in) { ENTRY_BODY(launch(vectors<float, 4>, {1, 32}, out, in)); }
ENTRY(run_vectors_f16x8, float16* out, const float16* in) { ENTRY_BODY(launch(vectors<float16, 8>, {1, 32}, out, in)); }
ENTRY(run_vectors_f16x4, float16* out, const float16* in) { ENTRY_BODY(launch(vectors<float16, 4>, {1, 32}, out, in)); }
ENTRY(run_vectors_f16x2, float16* out, const float16* in) { ENTRY_BODY(launch(vectors<float16, 2>, {1, 32}, out, in)); }
ENTRY(run_vectors_u8x16, uint8_t* out, const uint8_t* in) {
  ENTRY_BODY(launch(vectors<uint8_t, 16>, {1, 32}, out, in));
}
ENTRY(run_round_trip, int64_t bf16, float* back, uint32_t* packed, const float* in) {
  ENTRY_BODY(launch(bf16 ? round_trip<bfloat16> : round_trip<float16>, {1, 32}, back, packed, in));
}
ENTRY(run_math, float* out, const float* in) { ENTRY_BODY(launch(math, {1, 32}, out, in)); }
ENTRY(run_atomics, int* out) { ENTRY_BODY(launch(atomics, {2, 64}, out)); }
ENTRY(run_shape, int64_t blocks, int64_t threads, int64_t shared) {
  ENTRY_BODY(launch(indices, {dim3(blocks), dim3(threads), static_cast<size_t>(shared)}, nullptr));
}
