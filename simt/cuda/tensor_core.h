// What mma.sync and ldmatrix do, by the fragment tables of the PTX ISA, sections "Matrix Fragments for mma.m16n8k16"
// and "ldmatrix". Lane l has group g = l / 4 and pair t = 2 * (l % 4).
#pragma once

#include "builtins.h"

namespace simt::cuda {

struct MmaOperands {
  const uint32_t *a, *b;
  const float* c;
};

// Register r of a fragment holds elements k and k + 1 of one row.
template <class T>
inline void unpack(uint32_t bits, float* pair) {
  T values[2];
  memcpy(static_cast<void*>(values), &bits, sizeof bits);
  pair[0] = static_cast<float>(values[0]);
  pair[1] = static_cast<float>(values[1]);
}

// D = A B + C with A 16x16 row-major, B 16x8 column-major, float32 sums.
template <class T>
void combine_mma(const WarpCall& call) {
  float a[16][16], b[8][16];
  call.for_each_lane([&](int lane) {
    const MmaOperands& in = call.in<MmaOperands>(lane);
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int r = 0; r < 4; ++r) unpack<T>(in.a[r], &a[g + 8 * (r & 1)][t + 8 * (r >> 1)]);
    for (int r = 0; r < 2; ++r) unpack<T>(in.b[r], &b[g][t + 8 * r]);
  });
  call.for_each_lane([&](int lane) {
    const float* c = call.in<MmaOperands>(lane).c;
    const int g = lane / 4, t = 2 * (lane % 4);
    float* d = &call.out<float>(lane);
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[g + 8 * (i >> 1)][k] * b[t + (i & 1)][k];
      d[i] = c[i] + sum;
    }
  });
}

template <class T>
SIMT_INLINE void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, Site at = here()) {
  const MmaOperands in{a, b, d};
  warp_collective(~0u, &in, d, combine_mma<T>, "mma.m16n8k16", at);
}

// Lane l gives the address of row l % 8 of matrix l / 8 and receives elements t, t + 1 of row g of each matrix, or
// of column g if transposed.
template <int kMatrices, bool kTranspose>
void combine_ldmatrix(const WarpCall& call) {
  uint16_t rows[kMatrices][8][8];
  for (int lane = 0; lane < 8 * kMatrices; ++lane) {
    const void* row = call.in<const void*>(lane);
    touch_read(row, 16, lane);
    memcpy(rows[lane / 8][lane % 8], row, 16);
  }
  call.for_each_lane([&](int lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    uint32_t* out = &call.out<uint32_t>(lane);
    for (int m = 0; m < kMatrices; ++m) {
      const uint32_t low = kTranspose ? rows[m][t][g] : rows[m][g][t];
      const uint32_t high = kTranspose ? rows[m][t + 1][g] : rows[m][g][t + 1];
      out[m] = low | high << 16;
    }
  });
}

template <int kMatrices, bool kTranspose>
SIMT_INLINE void ldmatrix(uint32_t* registers, const void* row, Site at = here()) {
  warp_collective(~0u, &row, registers, combine_ldmatrix<kMatrices, kTranspose>, "ldmatrix", at);
}

}  // namespace simt::cuda
