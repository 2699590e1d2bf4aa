// Access patterns whose transactions are known.
#include "common/cuda/device.cuh"
#include "simt/tests/kernels/entry.h"

using namespace rudnn;

template <int kRow>
__global__ void matrix_rows(uint32_t* y, const float*) {
  __shared__ __align__(16) uint16_t tile[8 * kRow];
  const int lane = threadIdx.x;
  for (int i = lane; i < 8 * kRow; i += kWarpSize) tile[i] = 0;
  __syncthreads();
  uint32_t r[1];
  ldmatrix<1>(r, tile + lane % 8 * kRow);  // ldmatrix
  y[lane] = r[0];
}

__global__ void patterns(float* y, const float* x) {
  __shared__ float tile[32 * 33];
  const int lane = threadIdx.x;
  for (int i = lane; i < 32 * 33; i += kWarpSize) tile[i] = 0;
  __syncthreads();
  float sum = x[lane];                  // coalesced
  sum += x[lane + 1];                   // one element late
  sum += x[2 * lane];                   // every other
  sum += x[0];                          // broadcast
  sum += load_vec<4>(x + 4 * lane)[2];  // vectors
  sum += tile[lane];                    // one row
  sum += tile[32 * lane];               // one column
  sum += tile[33 * lane];               // padded column
  sum += tile[2 * lane];                // two to a bank
  y[lane] = sum;                        // store
}

ENTRY(run_patterns, float* y, const float* x) { ENTRY_BODY(launch(patterns, {1, 32}, y, x)); }
ENTRY(run_matrix_rows, int64_t padded, uint32_t* y, const float* x) {
  ENTRY_BODY(launch(padded ? matrix_rows<72> : matrix_rows<64>, {1, 32}, y, x));
}
