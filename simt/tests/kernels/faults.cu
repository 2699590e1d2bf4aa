// One kernel per fault that the bench must find, and with kFault = false its correct twin. The line that the error
// names carries "at: <kernel>" or, where the order of the threads decides, "either: <kernel>"; the other side of a
// race carries "other: <kernel>" or "either: <kernel>".
#include "common/cuda/device.cuh"
#include "simt/tests/kernels/entry.h"

using namespace rudnn;

constexpr int kThreads = 64;

// Shared memory

template <bool kFault>
__global__ void missing_barrier(float* y, const float* x) {
  __shared__ float tile[kThreads];
  const int i = threadIdx.x;
  tile[i] = x[i];
  __syncthreads();
  const float mirrored = tile[kThreads - 1 - i];  // either: missing_barrier
  if (!kFault) __syncthreads();
  tile[i] = 2 * mirrored;  // either: missing_barrier
  __syncthreads();
  y[i] = tile[i];
}

template <bool kFault>
__global__ void missing_warp_barrier(float* y, const float* x) {
  __shared__ float tile[kThreads];
  const int i = threadIdx.x;
  tile[i] = 0;
  __syncthreads();
  tile[i] = x[i];  // either: missing_warp_barrier
  if (!kFault) __syncwarp();
  y[i] = tile[i ^ 1];  // either: missing_warp_barrier
}

template <bool kFault>
__global__ void uninitialised_read(float* y, const float* x) {
  __shared__ float sums[kThreads / kWarpSize + 1];
  const int i = threadIdx.x;
  const float sum = warp_sum(x[i]);
  if (i % kWarpSize == 0) sums[i / kWarpSize] = sum;
  if (!kFault && i == 0) sums[kThreads / kWarpSize] = 0;
  __syncthreads();
  y[i] = sums[0] + sums[1] + sums[2];  // at: uninitialised_read
}

template <bool kFault>
__global__ void shared_overrun(float* y, const float* x) {
  DYNAMIC_SHARED(raw);
  float* tile = reinterpret_cast<float*>(raw);
  const int i = threadIdx.x;
  tile[i + kFault] = x[i];  // at: shared_overrun
  __syncthreads();
  y[i] = tile[i + kFault];
}

template <bool kFault>
__global__ void array_index(float* y, const float* x) {
  __shared__ float rows[2][kThreads];
  const int i = threadIdx.x;
  for (int row = 0; row < 2 + kFault; ++row) rows[row][i] = x[i];  // at: array_index
  y[i] = rows[0][i] + rows[1][i];
}

// Global memory

template <bool kFault>
__global__ void read_before_start(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = x[i - kFault];  // at: read_before_start
}

template <bool kFault>
__global__ void write_past_end(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i + kFault] = x[i];  // at: write_past_end
  if (kFault && i == 0) y[0] = 0;
}

template <bool kFault>
__global__ void misaligned_vector(float* y, const float* x) {
  const int i = threadIdx.x;
  const auto four = load_vec<4>(x + 4 * i + kFault);  // at: misaligned_vector
  y[i] = four[0] + four[3];
}

template <bool kFault>
__global__ void write_to_input(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = x[i];
  if (kFault) const_cast<float*>(x)[i] = 0;  // at: write_to_input
}

template <bool kFault>
__global__ void blocks_overlap(float* y, const float* x) {
  const int i = threadIdx.x + (kFault ? blockIdx.x * (kThreads / 2) : blockIdx.x * kThreads);
  y[i] = x[i];  // at: blocks_overlap
}

template <bool kFault>
__global__ void threads_overlap(float* y, const float* x) {
  const int i = threadIdx.x;
  y[kFault ? i / 2 : i] = x[i];  // at: threads_overlap
}

template <bool kFault>
__global__ void global_without_barrier(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = x[i];  // either: global_without_barrier
  if (!kFault) __syncthreads();
  const float mirrored = y[kThreads - 1 - i];  // either: global_without_barrier
  __syncthreads();
  y[i] = mirrored;
}

template <bool kFault>
__global__ void plain_beside_atomic(float* y, const float* x) {
  const int i = threadIdx.x;
  if (blockIdx.x == 0) y[i + 1] = x[i];
  if (kFault)
    y[0] = y[0] + 1;  // at: plain_beside_atomic
  else
    atomicAdd(y, 1.0f);
}

template <bool kFault>
__global__ void unwritten_output(float* y, const float* x) {
  const int i = threadIdx.x;
  if (!kFault || i < kThreads - 1) y[i] = x[i];
}

template <bool kFault>
__global__ void output_read_first(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = (kFault ? y[i] : 0) + x[i];  // at: output_read_first
}

// Barriers and warps

template <bool kFault>
__global__ void divergent_barrier(float* y, const float* x) {
  const int i = threadIdx.x;
  if (!kFault) {
    __syncthreads();
  } else if (i < kWarpSize) {
    __syncthreads();  // either: divergent_barrier
  } else {
    __syncthreads();  // either: divergent_barrier
  }
  y[i] = x[i];
}

template <bool kFault>
__global__ void early_return(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = x[i];
  if (kFault && i >= 40) return;
  __syncthreads();  // at: early_return
}

template <bool kFault>
__global__ void lanes_apart(float* y, const float* x) {
  const int i = threadIdx.x;
  float value = x[i];
  if (!kFault || i % kWarpSize < 16) value = __shfl_xor_sync(kFullMask, value, 1);  // either: lanes_apart
  __syncthreads();                                                                  // either: lanes_apart
  y[i] = value;
}

template <bool kFault>
__global__ void absent_source_lane(float* y, const float* x) {
  const int i = threadIdx.x;
  float value = x[i];
  if (i % kWarpSize < 16) value = __shfl_xor_sync(0x0000ffffu, value, kFault ? 16 : 8);  // at: absent_source_lane
  y[i] = value;
}

template <bool kFault>
__global__ void named_barrier_count(float* y, const float* x) {
  __shared__ float tile[kThreads];
  const int i = threadIdx.x;
  tile[i] = x[i];
  named_barrier_sync(1, kFault ? kThreads / 2 : kThreads);
  const float mirrored = tile[kThreads - 1 - i];  // at: named_barrier_count
  y[i] = mirrored;
}

template <bool kFault>
__global__ void part_of_a_warp_at_a_barrier(float* y, const float* x) {
  const int i = threadIdx.x;
  named_barrier_sync(1, kFault ? kThreads - 8 : kThreads);  // at: part_of_a_warp_at_a_barrier
  y[i] = x[i];
}

template <bool kFault>
__global__ void local_memory_of_another(float* y, const float* x) {
  __shared__ const float* shared_pointer;
  const int i = threadIdx.x;
  float mine[2] = {x[i], x[i + 1]};
  if (i == 0) shared_pointer = mine;
  __syncthreads();
  const float* pointer = kFault ? shared_pointer : mine;
  y[i] = pointer[i % 2];  // at: local_memory_of_another
  __syncthreads();
}

// Asynchronous copies

template <bool kFault>
__global__ void weak_wait(float* y, const float* x) {
  __shared__ __align__(16) float tile[2][4 * kThreads];
  const int i = threadIdx.x;
  for (int stage = 0; stage < 2; ++stage) {
    cp_async<16>(&tile[stage][4 * i], x + 4 * i);  // other: weak_wait
    cp_async_commit();
  }
  cp_async_wait<kFault ? 1 : 0>();
  y[i] = tile[0][4 * i] + tile[1][4 * i + 3];  // at: weak_wait
  cp_async_wait<0>();
}

template <bool kFault>
__global__ void copy_without_barrier(float* y, const float* x) {
  __shared__ __align__(16) float tile[4 * kThreads];
  const int i = threadIdx.x;
  for (int k = 0; k < 4; ++k) tile[4 * i + k] = 0;
  __syncthreads();
  cp_async<16>(&tile[4 * i], x + 4 * i);  // either: copy_without_barrier
  cp_async_commit();
  cp_async_wait<0>();
  if (!kFault) __syncthreads();
  y[i] = tile[4 * (kThreads - 1 - i)];  // either: copy_without_barrier
}

template <bool kFault>
__global__ void copy_over_unread(float* y, const float* x) {
  __shared__ __align__(16) float tile[4 * kThreads];
  const int i = threadIdx.x;
  float sum = 0;
  for (int step = 0; step < 2; ++step) {
    cp_async<16>(&tile[4 * i], x + 4 * (step * kThreads + i));  // either: copy_over_unread
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    sum += tile[4 * (kThreads - 1 - i)];  // either: copy_over_unread
    if (!kFault) __syncthreads();
  }
  y[i] = sum;
}

template <bool kFault>
__global__ void matrix_without_barrier(float* y, const float* x) {
  __shared__ __align__(16) uint16_t rows[kThreads][8];
  const int i = threadIdx.x;
  for (int k = 0; k < 8; ++k) rows[i][k] = static_cast<uint16_t>(x[i]);
  if (!kFault) __syncthreads();
  uint32_t r[4];
  ldmatrix<4>(r, rows[kThreads - 1 - i]);  // at: matrix_without_barrier
  y[i] = static_cast<float>(r[0] & 0xffff);
}

template <bool kFault>
__global__ void copy_never_waited(float* y, const float* x) {
  __shared__ __align__(16) float tile[4 * kThreads];
  const int i = threadIdx.x;
  cp_async<16>(&tile[4 * i], x + 4 * i);  // at: copy_never_waited
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  y[i] = x[i];
}

template <bool kFault>
__global__ void bulk_copy_never_waited(float* y, const float* x) {
  __shared__ __align__(128) float tile[kThreads];
  __shared__ uint64_t full;
  const int i = threadIdx.x;
  if (i == 0) {
    mbarrier_init(&full, 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect(&full, sizeof tile);
    bulk_copy(tile, x, sizeof tile, &full);  // at: bulk_copy_never_waited
    if (!kFault) mbarrier_wait(&full, 0);
  }
  y[i] = x[i];
}

// A ring of kStages tiles: warp 0 fills them by bulk copies, warp 1 reads them. PipelineFault selects what is wrong.

enum PipelineFault { kNone, kEarlyArrival, kNoFullWait, kNoEmptyWait, kNoArrival, kNoInitBarrier };

template <PipelineFault kWrong>
__device__ __forceinline__ void pipeline(float* y, const float* x) {
  constexpr int kStages = 2, kTiles = 6, kTile = 32;
  __shared__ __align__(128) float ring[kStages][kTile];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], 1);
    }
    mbarrier_fence_init();
  }
  if (kWrong != kNoInitBarrier) __syncthreads();
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages, parity = tile / kStages % 2;
    if (warp == 0 && lane == 0) {
      if (kWrong != kNoEmptyWait) mbarrier_wait(&empty[stage], parity ^ 1);        // at: pipeline_no_arrival
      mbarrier_arrive_expect(&full[stage], sizeof ring[stage]);                    // at: pipeline_no_empty_wait
      bulk_copy(ring[stage], x + tile * kTile, sizeof ring[stage], &full[stage]);  // either: pipeline_early_arrival
    }
    if (warp == 1) {
      if (kWrong != kNoFullWait) mbarrier_wait(&full[stage], parity);  // at: pipeline_no_init_barrier
      if (kWrong == kEarlyArrival && lane == 0) mbarrier_arrive(&empty[stage]);
      const float value = ring[stage][lane];  // at: pipeline_no_full_wait, either: pipeline_early_arrival
      y[tile * kTile + lane] = 2 * value;
      __syncwarp();
      if (kWrong != kEarlyArrival && kWrong != kNoArrival && lane == 0) mbarrier_arrive(&empty[stage]);
    }
  }
}

template <bool kFault>
__global__ void pipeline_early_arrival(float* y, const float* x) {
  pipeline<kFault ? kEarlyArrival : kNone>(y, x);
}
template <bool kFault>
__global__ void pipeline_no_full_wait(float* y, const float* x) {
  pipeline<kFault ? kNoFullWait : kNone>(y, x);
}
template <bool kFault>
__global__ void pipeline_no_empty_wait(float* y, const float* x) {
  pipeline<kFault ? kNoEmptyWait : kNone>(y, x);
}
template <bool kFault>
__global__ void pipeline_no_arrival(float* y, const float* x) {
  pipeline<kFault ? kNoArrival : kNone>(y, x);
}
template <bool kFault>
__global__ void pipeline_no_init_barrier(float* y, const float* x) {
  pipeline<kFault ? kNoInitBarrier : kNone>(y, x);
}

// Both warps read each whole tile, and the next copy waits for both; the fault lets it pass the reads of warp 1.
template <bool kFault>
__global__ void pipeline_two_readers(float* y, const float* x) {
  __shared__ __align__(128) float tile[kWarpSize];
  __shared__ uint64_t full, empty;
  const int i = threadIdx.x, warp = i / kWarpSize, lane = i % kWarpSize;
  if (i == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, 2);
    mbarrier_fence_init();
  }
  __syncthreads();
  for (int step = 0; step < 3; ++step) {
    if (i == 0) {
      mbarrier_wait(&empty, (step + 1) % 2);
      mbarrier_arrive_expect(&full, sizeof tile);
      bulk_copy(tile, x + step * kWarpSize, sizeof tile, &full);  // either: pipeline_two_readers
    }
    mbarrier_wait(&full, step % 2);
    const bool early = kFault && warp == 1;
    if (early && lane == 0) mbarrier_arrive(&empty);
    float sum = 0;
    for (int k = 0; k < kWarpSize; ++k) sum += tile[k];  // either: pipeline_two_readers
    y[step * kThreads + i] = sum;
    __syncwarp();
    if (!early && lane == 0) mbarrier_arrive(&empty);
  }
}

// Arithmetic

template <bool kFault>
__global__ void wide_shift(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = static_cast<float>(1 << (i % 31 + (kFault ? static_cast<int>(x[i]) + 32 : 0)));  // at: wide_shift
}

template <bool kFault>
__global__ void division_by_zero(float* y, const float* x) {
  const int i = threadIdx.x;
  y[i] = static_cast<float>(100 / (kFault ? i - 7 : i + 1));  // at: division_by_zero
}

#define FAULT(name, blocks, shared)                                                 \
  ENTRY(name##_run, int64_t fault, float* y, const float* x) {                      \
    ENTRY_BODY({                                                                    \
      const LaunchConfig config{blocks, kThreads, shared};                          \
      fault ? launch(name<true>, config, y, x) : launch(name<false>, config, y, x); \
    });                                                                             \
  }

FAULT(missing_barrier, 1, 0)
FAULT(missing_warp_barrier, 1, 0)
FAULT(uninitialised_read, 1, 0)
FAULT(shared_overrun, 1, kThreads * sizeof(float))
FAULT(array_index, 1, 0)
FAULT(read_before_start, 1, 0)
FAULT(write_past_end, 1, 0)
FAULT(misaligned_vector, 1, 0)
FAULT(write_to_input, 1, 0)
FAULT(blocks_overlap, 2, 0)
FAULT(threads_overlap, 1, 0)
FAULT(global_without_barrier, 1, 0)
FAULT(plain_beside_atomic, 2, 0)
FAULT(unwritten_output, 1, 0)
FAULT(output_read_first, 1, 0)
FAULT(divergent_barrier, 1, 0)
FAULT(early_return, 1, 0)
FAULT(lanes_apart, 1, 0)
FAULT(absent_source_lane, 1, 0)
FAULT(named_barrier_count, 1, 0)
FAULT(part_of_a_warp_at_a_barrier, 1, 0)
FAULT(local_memory_of_another, 1, 0)
FAULT(weak_wait, 1, 0)
FAULT(copy_without_barrier, 1, 0)
FAULT(copy_over_unread, 1, 0)
FAULT(matrix_without_barrier, 1, 0)
FAULT(copy_never_waited, 1, 0)
FAULT(bulk_copy_never_waited, 1, 0)
FAULT(pipeline_early_arrival, 1, 0)
FAULT(pipeline_no_full_wait, 1, 0)
FAULT(pipeline_no_empty_wait, 1, 0)
FAULT(pipeline_no_arrival, 1, 0)
FAULT(pipeline_no_init_barrier, 1, 0)
FAULT(pipeline_two_readers, 1, 0)
FAULT(wide_shift, 1, 0)
FAULT(division_by_zero, 1, 0)
