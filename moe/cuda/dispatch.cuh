// dispatch: a stable counting sort of the slots by expert, and the tokens' rows in that order.
//
// Slots are split into chunks of `chunk_slots`, each counted and placed by one warp. Slots without an expert go to one
// more bucket, after the experts'. A warp keeps the counts of kBucketTile buckets in shared memory; where there are
// more, further warps read the same slots for the others.
#pragma once

#include "cuda/arguments.cuh"

namespace rudnn {

constexpr int kBucketTile = 2048;
constexpr int kSortWarps = 4;
constexpr int kScanThreads = 1024;

struct SortArgs {
  int64_t slots;
  int64_t top_k;
  int64_t experts;
  int64_t chunks;
  int64_t chunk_slots;  // a multiple of 32
  Indices indices;      // [slots]
  int32_t* counts;      // [chunks, experts + 1]: slots of a chunk in a bucket, then the bucket's rows of earlier chunks
  int32_t* expert_offsets;  // [experts + 1]
  int32_t* row_experts;     // [slots]
  int32_t* row_tokens;      // [slots]
  int32_t* row_slots;       // [slots]
  int32_t* slot_rows;       // [slots]
};

// A warp's walk through the slots of its chunk, for the buckets first_bucket() to first_bucket() + buckets() - 1.
class ChunkWalk {
 public:
  __device__ __forceinline__ explicit ChunkWalk(const SortArgs& args)
      : args_(args), chunk_(int64_t{blockIdx.x} * kSortWarps + threadIdx.x / kWarpSize) {}

  __device__ __forceinline__ bool exists() const { return chunk_ < args_.chunks; }
  __device__ __forceinline__ int64_t first_bucket() const { return int64_t{blockIdx.y} * kBucketTile; }
  __device__ __forceinline__ int buckets() const {
    return static_cast<int>(min(int64_t{kBucketTile}, args_.experts + 1 - first_bucket()));
  }
  // The chunk's counts of these buckets.
  __device__ __forceinline__ int32_t* counts() const {
    return args_.counts + chunk_ * (args_.experts + 1) + first_bucket();
  }

  // Calls visit(slot, bucket - first_bucket(), lanes) for the slots of this lane, in rounds that the whole warp takes
  // part in; `lanes` is the set of lanes whose slots are of this bucket. A slot of other buckets comes with a bucket of
  // -1.
  template <class Visit>
  __device__ __forceinline__ void for_each_slot(Visit visit) const {
    const int64_t end = min(args_.slots, (chunk_ + 1) * args_.chunk_slots);
    for (int64_t first = chunk_ * args_.chunk_slots; first < end; first += kWarpSize) {
      const int64_t slot = first + warp_lane();
      int bucket = -1;
      if (slot < end) {
        const int64_t expert = args_.indices[slot];
        const int64_t from_first = (expert >= 0 && expert < args_.experts ? expert : args_.experts) - first_bucket();
        if (from_first >= 0 && from_first < buckets()) bucket = static_cast<int>(from_first);
      }
      visit(slot, bucket, __match_any_sync(kFullMask, bucket));
    }
  }

 private:
  const SortArgs& args_;
  int64_t chunk_;
};

// The lanes of a set before this one.
__device__ __forceinline__ int lanes_before(unsigned lanes) { return __popc(lanes & ((1u << warp_lane()) - 1)); }

__global__ void __launch_bounds__(kSortWarps* kWarpSize) count_slots(SortArgs args) {
  __shared__ int32_t shared[kSortWarps][kBucketTile];
  const ChunkWalk walk(args);
  if (!walk.exists()) return;
  int32_t* counts = shared[threadIdx.x / kWarpSize];
  for (int bucket = warp_lane(); bucket < walk.buckets(); bucket += kWarpSize) counts[bucket] = 0;
  __syncwarp();
  walk.for_each_slot([&](int64_t, int bucket, unsigned lanes) {
    if (bucket >= 0 && lanes_before(lanes) == 0) counts[bucket] += __popc(lanes);
    __syncwarp();
  });
  for (int bucket = warp_lane(); bucket < walk.buckets(); bucket += kWarpSize) walk.counts()[bucket] = counts[bucket];
}

// The sum over the threads before this one, and over all of the block. Two barriers.
struct BlockScan {
  int32_t before;
  int32_t total;
};
__device__ __forceinline__ BlockScan block_scan(int32_t value) {
  __shared__ int32_t warp_sums[kScanThreads / kWarpSize];
  const int lane = warp_lane(), warp = threadIdx.x / kWarpSize;
  const auto warp_scan = [&](int32_t x) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t below = __shfl_up_sync(kFullMask, x, distance);
      if (lane >= distance) x += below;
    }
    return x;
  };
  const int32_t scanned = warp_scan(value);
  if (lane == kWarpSize - 1) warp_sums[warp] = scanned;
  __syncthreads();
  const int32_t scanned_sums = warp_scan(warp_sums[lane]);
  const int32_t earlier = __shfl_sync(kFullMask, scanned_sums, max(warp - 1, 0));
  __syncthreads();  // the next call writes `warp_sums` again
  return {(warp > 0 ? earlier : 0) + scanned - value, __shfl_sync(kFullMask, scanned_sums, kWarpSize - 1)};
}

// One block: a thread sums the chunks' counts of a bucket, and the block the buckets.
__global__ void __launch_bounds__(kScanThreads) scan_counts(SortArgs args) {
  static_assert(kScanThreads == kWarpSize * kWarpSize, "a warp scans the sums of all warps");
  const int64_t buckets = args.experts + 1;
  int32_t rows = 0;
  for (int64_t first = 0; first < buckets; first += kScanThreads) {
    const int64_t bucket = first + threadIdx.x;
    int32_t count = 0;
    if (bucket < buckets) {
#pragma unroll 8
      for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
        int32_t& entry = args.counts[chunk * buckets + bucket];
        const int32_t of_chunk = entry;
        entry = count;
        count += of_chunk;
      }
    }
    const BlockScan scan = block_scan(count);
    if (bucket < buckets) args.expert_offsets[bucket] = rows + scan.before;
    rows += scan.total;
  }
}

__global__ void __launch_bounds__(kSortWarps* kWarpSize) place_slots(SortArgs args) {
  __shared__ int32_t shared[kSortWarps][kBucketTile];
  const ChunkWalk walk(args);
  if (!walk.exists()) return;
  int32_t* next_rows = shared[threadIdx.x / kWarpSize];
  for (int bucket = warp_lane(); bucket < walk.buckets(); bucket += kWarpSize)
    next_rows[bucket] = args.expert_offsets[walk.first_bucket() + bucket] + walk.counts()[bucket];
  __syncwarp();
  walk.for_each_slot([&](int64_t slot, int bucket, unsigned lanes) {
    const int32_t first = bucket >= 0 ? next_rows[bucket] : 0;
    __syncwarp();
    if (bucket >= 0) {
      if (lanes_before(lanes) == 0) next_rows[bucket] = first + __popc(lanes);
      const int32_t row = first + lanes_before(lanes);
      const int64_t expert = walk.first_bucket() + bucket;
      const bool has_expert = expert < args.experts;
      args.slot_rows[slot] = has_expert ? row : -1;
      args.row_experts[row] = has_expert ? static_cast<int32_t>(expert) : -1;
      args.row_tokens[row] = has_expert ? static_cast<int32_t>(slot / args.top_k) : -1;
      args.row_slots[row] = has_expert ? static_cast<int32_t>(slot) : -1;
    }
    __syncwarp();
  });
}

struct GatherArgs {
  int64_t rows;
  int64_t width;
  const int32_t* row_tokens;  // [rows], -1 for a row of zeros
  const void* input;          // [tokens, width]
  void* values;               // [rows, width]
};

template <class T, int kVector>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) gather_rows(GatherArgs args) {
  const Piece<kVector> piece(args.rows, args.width);
  const int64_t token = piece.exists() ? args.row_tokens[piece.row()] : -1;
  const T* input = static_cast<const T*>(args.input) + token * args.width;
  T* values = static_cast<T*>(args.values) + piece.row() * args.width;
  Vec<T, kVector> held[kVectorsPerLane] = {};
  if (token >= 0) {
    piece.for_each_vector([&](int slot, int64_t offset) { held[slot] = load_vec<kVector>(input + offset); });
  }
  piece.for_each_vector([&](int slot, int64_t offset) { store_vec(values + offset, held[slot]); });
}

}  // namespace rudnn
