// Operands of tensor cores in shared memory, and their fragments, for float16 and bfloat16.
#pragma once

#include "common/cuda/operand.cuh"

namespace rudnn {

// Elements of an operand in shared memory: kRows rows of kColumns, in chunks of 16 bytes. The chunks of a row are
// permuted so that eight neighbouring rows have the same chunk in different banks.
template <class T, int kRows, int kColumns>
struct SwizzledStage {
  static constexpr int kChunkElements = 16 / sizeof(T);
  static constexpr int kChunks = kColumns / kChunkElements;            // of a row
  static constexpr int kRowsPerLine = kChunks >= 8 ? 1 : 8 / kChunks;  // a line is 128 bytes, all banks
  static constexpr int kPermuted = kChunks >= 8 ? 8 : kChunks;

  static __device__ __forceinline__ int position(int row, int chunk) {
    return (row * kChunks + (chunk ^ (row / kRowsPerLine % kPermuted))) * kChunkElements;
  }

  // Copies a slice, zeros where the operand has no elements. Rows that are not whole chunks are copied element by
  // element, so that every width has its products done by the tensor cores.
  template <int kThreads, class Operand>
  static __device__ __forceinline__ void load(T* shared, const Slice<Operand>& slice, bool vectors) {
    constexpr int kCopies = kRows * kChunks / kThreads;
    static_assert(kRows * kChunks % kThreads == 0, "every thread copies the same number of chunks");
    const int64_t columns = slice.operand.columns;
    if (vectors) {
#pragma unroll 4
      for (int i = 0; i < kCopies; ++i) {
        const Place place = place_of(threadIdx.x + i * kThreads);
        const T* row = slice.operand.row(slice.row + place.row);
        const int64_t column = slice.column + place.chunk * kChunkElements;
        cp_async<16>(shared + position(place.row, place.chunk), row + column, row != nullptr && column < columns);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const Place place = place_of(threadIdx.x + i * kThreads);
        const T* row = slice.operand.row(slice.row + place.row);
        const int64_t column = slice.column + place.chunk * kChunkElements;
        store_vec(shared + position(place.row, place.chunk), load_ragged<kChunkElements>(row, column, columns));
      }
    }
  }

 private:
  struct Place {
    int row;
    int chunk;
  };
  static __device__ __forceinline__ Place place_of(int copy) { return {copy / kChunks, copy % kChunks}; }
};

// Fragments for mma_m16n8k16 from a stage. If the summed axis runs along the rows of the operand, its rows are those of
// the tile, else they are positions of the summed axis and ldmatrix transposes.
template <class T, int kExtent, int kDepth, bool kAlongRows>
struct FragmentLoader {
  using Stage = SwizzledStage<T, kAlongRows ? kExtent : kDepth, kAlongRows ? kDepth : kExtent>;

  // Rows `row` to `row` + 15 of the left operand at 16 positions of the summed axis, from `depth` on.
  static __device__ __forceinline__ void left(uint32_t (&a)[4], const T* stage, int row, int depth) {
    load(a, stage, row, depth, warp_lane() / 8 % 2, warp_lane() / 16);
  }
  // The same of 16 columns of the right operand: two fragments, one after the other.
  static __device__ __forceinline__ void right(uint32_t (&b)[4], const T* stage, int column, int depth) {
    load(b, stage, column, depth, warp_lane() / 16, warp_lane() / 8 % 2);
  }

 private:
  // This lane's matrix lies 8 * `extent_half` further in the tile and 8 * `depth_half` further in the summed axis.
  static __device__ __forceinline__ void load(uint32_t (&registers)[4], const T* stage, int extent, int depth,
                                              int extent_half, int depth_half) {
    const int lane_row = warp_lane() % 8;
    if constexpr (kAlongRows)
      ldmatrix<4>(registers, stage + Stage::position(extent + 8 * extent_half + lane_row, depth / 8 + depth_half));
    else
      ldmatrix<4, true>(registers,
                        stage + Stage::position(depth + 8 * depth_half + lane_row, extent / 8 + extent_half));
  }
};

}  // namespace rudnn
