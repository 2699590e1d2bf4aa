// Products of tiles in threadgroup memory, by SIMD or by simdgroup matrices. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/device_function.h"
#include "common/metal/tile_sizes.h"

namespace rudnn {

// Lines of contiguous elements in device memory, of which those in [0, lines) x [0, length) exist. With `lines_of`,
// line i is where lines_of[i] says.
template <typename T>
struct Lines {
  device const T* elements;
  long stride;
  long lines;
  long length;
  device const int* lines_of;

  device const T* at(long line, long position) const {
    const long at = lines_of != nullptr ? long(lines_of[line]) : line;
    return elements + at * stride + position;
  }
};

// A tile of an operand: kOuter rows (of a left operand) or columns (of a right one), of which it has kDepth elements
// each that meet those of the other operand. Lines run along the depth, or across it.
template <typename T, int kOuter, bool kAlongDepth>
struct Tile {
  static constant constexpr bool kAlong = kAlongDepth;
  static constant constexpr int kVector = 16 / int(sizeof(T));
  static constant constexpr int kDepth = kTileBytes / int(sizeof(T));
  static constant constexpr int kLines = kAlongDepth ? kOuter : kDepth;
  static constant constexpr int kLength = kAlongDepth ? kDepth : kOuter;
  static constant constexpr int kStride = kLength + kVector;  // keeps lines out of each other's banks
  static constant constexpr int kSize = kLines * kStride;

  static int offset_of(int outer, int depth) { return kAlongDepth ? outer * kStride + depth : depth * kStride + outer; }

  // Fills the tile from `outer` and `depth` on, with zeros where nothing exists. All threads of the threadgroup share
  // this, between two barriers. The source has the members lines, length and at() of Lines. With `aligned`, its lines
  // are whole vectors.
  template <typename Source>
  static void load(threadgroup T* tile, Source source, long outer, long depth, bool aligned, uint index) {
    constexpr int kVectors = kLength / kVector;
    for (int chunk = index; chunk < kLines * kVectors; chunk += kTileThreads) {
      const int line = chunk / kVectors;
      const int start = chunk % kVectors * kVector;
      const long from_line = (kAlongDepth ? outer : depth) + line;
      const long from_start = (kAlongDepth ? depth : outer) + start;
      const long left = from_line < source.lines ? source.length - from_start : 0;
      threadgroup T* to = tile + line * kStride + start;
      if (aligned) {
        uint4 values = uint4(0u);
        if (left > 0) values = *reinterpret_cast<device const uint4*>(source.at(from_line, from_start));
        *reinterpret_cast<threadgroup uint4*>(to) = values;
      } else {
        for (int i = 0; i < kVector; ++i) {
          to[i] = T(0.0f);
          if (i < left) to[i] = *source.at(from_line, from_start + i);
        }
      }
    }
  }
};

// A tile of the product, kTileRows x kTileColumns, of which a thread has kElements sums in float32, as many in each of
// its rows, row by row. Each sum runs over the depth in its order, whatever the other rows and columns are. `add` takes
// a tile of each operand; all threads call it together, and which row and column an element has only depends on the
// thread. kRowLanes has a bit for each distance between lanes that share a row, if all of a row are in one simdgroup.

// By SIMD: a thread has each eighth row and each sixteenth column. The depth of a tile is summed by itself, since the
// error of a sum grows with the number of its terms.
template <typename T>
struct ScalarProduct {
  static constant constexpr int kRowStep = 8;
  static constant constexpr int kColumnStep = 16;
  static constant constexpr int kRows = kTileRows / kRowStep;
  static constant constexpr int kColumns = kTileColumns / kColumnStep;
  static constant constexpr int kThreadRows = kRows;
  static constant constexpr int kElements = kRows * kColumns;
  static constant constexpr int kRowLanes = 1 | 2 | 4 | 8;

  float sums[kRows][kColumns];

  void clear() {
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kColumns; ++column) sums[row][column] = 0.0f;
  }

  template <typename Left, typename Right, typename LeftElement>
  void add(threadgroup const LeftElement* left, threadgroup const T* right, uint index) {
    const int first_row = row_of(0, index);
    const int first_column = column_of(0, index);
    float partial[kRows][kColumns] = {};
    for (int depth = 0; depth < Right::kDepth; ++depth) {
      float rows[kRows];
      float columns[kColumns];
      for (int row = 0; row < kRows; ++row) rows[row] = float(left[Left::offset_of(first_row + row * kRowStep, depth)]);
      for (int column = 0; column < kColumns; ++column)
        columns[column] = float(right[Right::offset_of(first_column + column * kColumnStep, depth)]);
      for (int row = 0; row < kRows; ++row)
        for (int column = 0; column < kColumns; ++column)
          partial[row][column] = fma(rows[row], columns[column], partial[row][column]);
    }
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kColumns; ++column) sums[row][column] += partial[row][column];
  }

  static int row_of(int element, uint index) { return int(index) / kColumnStep + element / kColumns * kRowStep; }
  static int column_of(int element, uint index) { return int(index) % kColumnStep + element % kColumns * kColumnStep; }
  float value(int element) { return sums[element / kColumns][element % kColumns]; }
  void set(int element, float value) { sums[element / kColumns][element % kColumns] = value; }
};

// By simdgroup matrices of 8 x 8: the four simdgroups have equal parts of the tile, kAcross of them side by side.
template <typename T, int kAcross>
struct MatrixProduct {
  static constant constexpr int kSimdgroupRows = kTileRows / (kTileThreads / 32 / kAcross);
  static constant constexpr int kSimdgroupColumns = kTileColumns / kAcross;
  static constant constexpr int kRows = kSimdgroupRows / 8;
  static constant constexpr int kColumns = kSimdgroupColumns / 8;
  static constant constexpr int kThreadRows = kRows;
  static constant constexpr int kElements = kRows * kColumns * 2;
  static constant constexpr int kRowLanes = 1 | 8;

  simdgroup_float8x8 sums[kRows][kColumns];

  void clear() {
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kColumns; ++column)
        sums[row][column] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  template <typename Left, typename Right>
  void add(threadgroup const T* left, threadgroup const T* right, uint index) {
    const int first_row = first_row_of(index);
    const int first_column = first_column_of(index);
    for (int depth = 0; depth < Right::kDepth; depth += 8) {
      simdgroup_matrix<T, 8, 8> rows[kRows];
      simdgroup_matrix<T, 8, 8> columns[kColumns];
      for (int row = 0; row < kRows; ++row)
        simdgroup_load(rows[row], left + Left::offset_of(first_row + row * 8, depth), ulong(Left::kStride),
                       ulong2(0, 0), !Left::kAlong);
      for (int column = 0; column < kColumns; ++column)
        simdgroup_load(columns[column], right + Right::offset_of(first_column + column * 8, depth),
                       ulong(Right::kStride), ulong2(0, 0), Right::kAlong);
      for (int row = 0; row < kRows; ++row)
        for (int column = 0; column < kColumns; ++column)
          simdgroup_multiply_accumulate(sums[row][column], rows[row], columns[column], sums[row][column]);
    }
  }

  // A lane has two neighbours of each matrix. Eight lanes have a quadrant, by rows.
  static int row_of(int element, uint index) {
    const int lane = int(index) % 32;
    return first_row_of(index) + element / 2 / kColumns * 8 + (lane / 16 * 4 + lane / 2 % 4);
  }
  static int column_of(int element, uint index) {
    const int lane = int(index) % 32;
    return first_column_of(index) + element / 2 % kColumns * 8 + (lane / 8 % 2 * 4 + lane % 2 * 2 + element % 2);
  }
  float value(int element) {
    return sums[element / 2 / kColumns][element / 2 % kColumns].thread_elements()[element % 2];
  }
  void set(int element, float value) {
    sums[element / 2 / kColumns][element / 2 % kColumns].thread_elements()[element % 2] = value;
  }

 private:
  static int first_row_of(uint index) { return int(index) / 32 / kAcross * kSimdgroupRows; }
  static int first_column_of(uint index) { return int(index) / 32 % kAcross * kSimdgroupColumns; }
};

// The threadgroup memory of an operand and what is read into it.
template <typename T, typename TileType, typename Source = Lines<T>>
struct Operand {
  using Shape = TileType;
  threadgroup T* tile;
  Source source;
  long outer;  // the first of the tile's rows or columns

  void load(long depth, bool aligned, uint index) const { Shape::load(tile, source, outer, depth, aligned, index); }
};

// Adds the product of two operands over the depths [first, end) to `product`. All threads of the threadgroup call this.
template <typename Left, typename Right, typename Product>
inline void add_product(Left left, Right right, long first, long end, bool aligned, uint index,
                        thread Product& product) {
  for (long depth = first; depth < end; depth += Left::Shape::kDepth) {
    left.load(depth, aligned, index);
    right.load(depth, aligned, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    product.template add<typename Left::Shape, typename Right::Shape>(left.tile, right.tile, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next round writes the tiles again
  }
}

}  // namespace rudnn
