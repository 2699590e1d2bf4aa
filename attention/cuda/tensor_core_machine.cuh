// Tiles of scores and of results on the tensor cores, for float16 and bfloat16.
#pragma once

#include "common/cuda/tensor_core_stage.cuh"
#include "cuda/problem.cuh"

namespace rudnn {

// Two packed elements, each replaced by 1 where keep(its bits) and by 0 elsewhere.
template <class T, class Keep>
__device__ __forceinline__ uint32_t indicators(uint32_t pair, Keep keep) {
  const uint32_t one = from_float<T>(1.0f).bits;
  return (keep(pair & 0xffffu) ? one : 0u) | (keep(pair >> 16) ? one << 16 : 0u);
}

// A warp has 16 of the stationary rows, 16 x 64 scores and 16 x kColumns results, whose weights stay in registers. The
// stationary rows are in shared memory as a whole. Streamed rows pass through a ring of stages, 64 rows of 64 columns
// at a time, in the order in which they are multiplied: while one is, the next ones are being copied. A role says which
// rows the products are of (walk.cuh).
template <class T, int rows, int columns>
class TensorCoreMachine {
 public:
  using Element = T;
  static constexpr int kRows = rows, kColumns = columns, kThreads = rows / 16 * kWarpSize;
  static constexpr int kLeastBlocks = rows == 64 ? 2 : 4;
  static constexpr int kThreadRows = 2, kThreadColumns = 16, kRowLanes = 4;
  static constexpr int kStages = 3;

  struct Scores {
    float fragments[kStreamed / 8][4] = {};
    __device__ __forceinline__ float& at(int i, int j) { return fragments[j / 2][2 * i + j % 2]; }
  };
  struct Result {
    float fragments[kColumns / 8][4] = {};
  };

  // With stationary rows of so many columns; 0 for a second product that a role does not have.
  __host__ static size_t shared_bytes(int64_t depth, int64_t second_depth) {
    const auto chunks = [](int64_t dim) { return static_cast<size_t>((dim + kChunk - 1) / kChunk); };
    return ((chunks(depth) + chunks(second_depth)) * kRows + kStages * kStreamed) * kChunk * sizeof(T);
  }
  static __device__ __forceinline__ int row(int i) { return warp_row() + warp_lane() / 4 + 8 * i; }
  static __device__ __forceinline__ int column(int j) { return j / 2 * 8 + 2 * (warp_lane() % 4) + j % 2; }

  template <class Role>
  __device__ __forceinline__ TensorCoreMachine(const Role& role, unsigned char* shared)
      : stationary_(reinterpret_cast<T*>(shared)), ring_(stationary_), copied_{role.first(), 0} {
    if (copied_.tile >= role.last()) return;
    load_stationary(role, role.template stationary<0>());
    if constexpr (Role::kProducts > 1) load_stationary(role, role.template stationary<1>());
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy_next(role, stage);
  }

  template <int kProduct, class Role>
  __device__ __forceinline__ void multiply(const Role& role, int64_t, Scores& scores) {
    using Left = FragmentLoader<T, kRows, kChunk, true>;
    using Right = FragmentLoader<T, kStreamed, kChunk, true>;
    const int64_t depth = role.template stationary<kProduct>().operand.columns;
    const T* left = stationary_;
    if constexpr (kProduct > 0) left += chunks_of(role.template stationary<0>().operand.columns) * kRows * kChunk;
    for (int64_t first = 0; first < depth; first += kChunk, left += kRows * kChunk) {
      const T* const right = next(role);
#pragma unroll
      for (int k = 0; k < kChunk; k += 16) {
        if (first + k >= depth) break;
        uint32_t a[4];
        Left::left(a, left, warp_row(), k);
#pragma unroll
        for (int j = 0; j < kStreamed / 8; j += 2) {
          uint32_t pair[4];
          Right::right(pair, right, 8 * j, k);
          multiply_pair(scores.fragments[j], scores.fragments[j + 1], a, pair);
        }
      }
    }
  }

  template <class Role>
  __device__ __forceinline__ void add_weighted(const Role& role, int64_t tile, Scores& weights, bool excluding,
                                               Result& result) {
    uint32_t a[kStreamed / 16][4];
    bool some = !excluding, zeros = false;
#pragma unroll
    for (int k = 0; k < kStreamed / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& fragment = weights.fragments[2 * k + i / 2];
        a[k][i] = pack(from_float<T>(fragment[i % 2 * 2]), from_float<T>(fragment[i % 2 * 2 + 1]));
        some |= (a[k][i] & 0x7fff7fffu) != 0;
        zeros |= (a[k][i] & 0x7fffu) == 0 || (a[k][i] & 0x7fff0000u) == 0;
      }
    some = __any_sync(kFullMask, some);
    excluding = __any_sync(kFullMask, excluding && zeros);
    const int64_t left = role.summed(tile).operand.columns - role.summed(tile).column;
#pragma unroll
    for (int first = 0; first < kColumns; first += kChunk) {
      if (first >= left) break;
      const T* const chunk = next(role);
      if (!some) continue;
      const bool finite = !excluding || is_finite(chunk);
#pragma unroll
      for (int j = 0; j < kChunk / 8; j += 2) {
        auto& even = result.fragments[first / 8 + j];
        auto& odd = result.fragments[first / 8 + j + 1];
#pragma unroll
        for (int k = 0; k < kStreamed / 16; ++k) {
          uint32_t pair[4];
          SummedLoader::right(pair, chunk, 8 * j, 16 * k);
          if (!finite) keep_finite(pair);
          multiply_pair(even, odd, a[k], pair);
        }
      }
      if (!finite) add_infinities(a, chunk, first, result);
    }
  }

  template <class Scale>
  static __device__ __forceinline__ void scale(Result& result, Scale factor_of) {
    const float factors[2] = {factor_of(0), factor_of(1)};
#pragma unroll
    for (auto& fragment : result.fragments)
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] *= factors[i / 2];
  }

  template <class Visit>
  static __device__ __forceinline__ void for_each_run(const Result& result, Visit visit) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float run[2] = {result.fragments[j][2 * i], result.fragments[j][2 * i + 1]};
        visit(i, column(2 * j), run);
      }
  }

 private:
  using StationaryStage = SwizzledStage<T, kRows, kChunk>;
  using Stage = SwizzledStage<T, kStreamed, kChunk>;
  static constexpr uint32_t kInfinityBits = std::is_same<T, bfloat16>::value ? 0x7f80u : 0x7c00u;

  static __device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / kWarpSize * 16; }
  static __device__ __forceinline__ int chunks_of(int64_t columns_of_operand) {
    return static_cast<int>((columns_of_operand + kChunk - 1) / kChunk);
  }

  // Copies the stationary rows of a product to where the ring begins, and moves that.
  template <class Role, class Operand>
  __device__ __forceinline__ void load_stationary(const Role& role, const Slice<Operand>& source) {
    for (int64_t column = 0; column < source.operand.columns; column += kChunk, ring_ += kRows * kChunk)
      StationaryStage::template load<kThreads>(ring_, slice(source.operand, source.row, column), role.vectors());
  }

  // The chunks of a tile: those of each product's depth, then those of the result's columns.
  struct Position {
    int64_t tile;
    int chunk;
  };

  template <class Role>
  __device__ __forceinline__ void copy_next(const Role& role, int stage) {
    T* const to = ring_ + stage * kStreamed * kChunk;
    if (copied_.tile < role.last()) {
      int chunk = copied_.chunk;
      const auto copy = [&](const auto& source, int64_t column) {
        Stage::template load<kThreads>(to, slice(source.operand, source.row, column), role.vectors());
      };
      const int first = chunks_of(role.template stationary<0>().operand.columns);
      int second = 0;
      if constexpr (Role::kProducts > 1) second = chunks_of(role.template stationary<1>().operand.columns);
      const auto summed = role.summed(copied_.tile);
      const int last = chunks_of(min(summed.operand.columns - summed.column, int64_t{kColumns}));
      if (chunk < first) {
        copy(role.template streamed<0>(copied_.tile), int64_t{chunk} * kChunk);
      } else if (chunk < first + second) {
        if constexpr (Role::kProducts > 1)
          copy(role.template streamed<1>(copied_.tile), int64_t{chunk - first} * kChunk);
      } else {
        copy(summed, summed.column + int64_t{chunk - first - second} * kChunk);
      }
      if (++copied_.chunk == first + second + last) copied_ = {role.next(copied_.tile), 0};
    }
    cp_async_commit();  // also of nothing, so that the groups can be counted
  }

  // The next chunk of the ring.
  template <class Role>
  __device__ __forceinline__ const T* next(const Role& role) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // shows the chunk to all, and that all are done with the one before it
    const int stage = used_;
    used_ = used_ + 1 == kStages ? 0 : used_ + 1;
    copy_next(role, stage == 0 ? kStages - 1 : stage - 1);
    return ring_ + stage * kStreamed * kChunk;
  }

  static __device__ __forceinline__ void multiply_pair(float (&even)[4], float (&odd)[4], const uint32_t (&a)[4],
                                                       const uint32_t (&pair)[4]) {
    mma_m16n8k16<T>(even, a, {pair[0], pair[1]});
    mma_m16n8k16<T>(odd, a, {pair[2], pair[3]});
  }

  using SummedLoader = FragmentLoader<T, kChunk, kStreamed, false>;

  // Whether a chunk has neither NaN nor infinity; the whole warp learns it.
  static __device__ __forceinline__ bool is_finite(const T* chunk) {
    constexpr uint32_t kMask = kInfinityBits * 0x10001u, kCarry = 0x80008000u - kMask;
    uint32_t carries = 0;
#pragma unroll 2
    for (int i = 0; i < kStreamed * kChunk / 8 / kWarpSize; ++i) {
      const auto part = load_vec<4>(reinterpret_cast<const uint32_t*>(chunk) + 4 * (warp_lane() + i * kWarpSize));
#pragma unroll
      for (int j = 0; j < 4; ++j) carries |= (part[j] & kMask) + kCarry;
    }
    return !__any_sync(kFullMask, (carries & 0x80008000u) != 0);
  }

  static __device__ __forceinline__ void keep_finite(uint32_t (&pair)[4]) {
#pragma unroll
    for (uint32_t& both : pair) {
      if ((both & kInfinityBits) == kInfinityBits) both &= 0xffff0000u;
      if ((both >> 16 & kInfinityBits) == kInfinityBits) both &= 0x0000ffffu;
    }
  }

  // Adds what the NaN and infinities of a chunk contribute where the weight is not 0, since 0 times these is NaN: by
  // the numbers of positive and of negative infinite terms. NaN counts as both.
  static __device__ __forceinline__ void add_infinities(const uint32_t (&a)[kStreamed / 16][4], const T* chunk,
                                                        int first, Result& result) {
#pragma unroll 1
    for (int column = 0; column < kChunk; column += 16) {
      float positive[2][4] = {}, negative[2][4] = {};
#pragma unroll
      for (int k = 0; k < kStreamed / 16; ++k) {
        uint32_t pair[4], up[4], down[4], plus[4], minus[4];
        SummedLoader::right(pair, chunk, column, 16 * k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto is_nan = [](uint32_t bits) { return (bits & 0x7fffu) > kInfinityBits; };
          up[i] = indicators<T>(pair[i], [&](uint32_t bits) { return bits == kInfinityBits || is_nan(bits); });
          down[i] =
              indicators<T>(pair[i], [&](uint32_t bits) { return bits == (kInfinityBits | 0x8000u) || is_nan(bits); });
          plus[i] = indicators<T>(a[k][i], [](uint32_t bits) { return bits != 0 && bits < 0x8000u; });
          minus[i] = indicators<T>(a[k][i], [](uint32_t bits) { return bits > 0x8000u; });
        }
        multiply_pair(positive[0], positive[1], plus, up);
        multiply_pair(positive[0], positive[1], minus, down);
        multiply_pair(negative[0], negative[1], plus, down);
        multiply_pair(negative[0], negative[1], minus, up);
      }
      // Fragments are in registers, which have no variable index.
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (j / 2 != (first + column) / 16) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (positive[j % 2][i] > 0.0f) result.fragments[j][i] += INFINITY;
          if (negative[j % 2][i] > 0.0f) result.fragments[j][i] -= INFINITY;
        }
      }
    }
  }

  T* stationary_;
  T* ring_;
  Position copied_;  // what is copied next
  int used_ = 0;     // the stage that is multiplied next
};

}  // namespace rudnn
