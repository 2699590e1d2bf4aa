#include <algorithm>

#include "simt/tests/kernels/entry.h"
#include "simt/tests/kernels/example_rms_norm.cuh"
#include "simt/tests/kernels/example_rms_norm.h"

namespace rudnn {

namespace {

struct RmsNormPlan {
  bool vectors;   // 16-byte accesses, else single elements
  bool warp_row;  // a warp a row, else a block
  int64_t blocks;
};

// `addresses`: the bits of all pointers together. Up to a few vectors a lane, a warp needs no barrier and keeps more
// rows in flight; 2048 blocks fill any device, and the rest of the rows is strided over.
RmsNormPlan plan_rms_norm(const RmsNormArgs& args, int element_bytes, uintptr_t addresses) {
  constexpr int64_t kWarpRowWidth = 1024, kMaxBlocks = 2048;
  RmsNormPlan plan;
  plan.vectors = addresses % 16 == 0 && args.width * element_bytes % 16 == 0;
  plan.warp_row = args.width <= kWarpRowWidth;
  const int64_t rows_per_block = plan.warp_row ? kRmsNormThreads / kWarpSize : 1;
  plan.blocks = std::min((args.rows + rows_per_block - 1) / rows_per_block, kMaxBlocks);
  return plan;
}

template <class T, class Gamma>
void launch_typed(const RmsNormArgs& args, const T* x, const Gamma* gamma, T* y, Stream stream) {
  constexpr int N = 16 / sizeof(T);
  const auto addresses =
      reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(gamma) | reinterpret_cast<uintptr_t>(y);
  const RmsNormPlan plan = plan_rms_norm(args, sizeof(T), addresses);
  const auto kernel = plan.vectors
                          ? (plan.warp_row ? rms_norm<T, Gamma, N, kWarpSize> : rms_norm<T, Gamma, N, kRmsNormThreads>)
                          : (plan.warp_row ? rms_norm<T, Gamma, 1, kWarpSize> : rms_norm<T, Gamma, 1, kRmsNormThreads>);
  launch(kernel, {dim3(static_cast<unsigned>(plan.blocks)), dim3(kRmsNormThreads), 0, stream}, x, gamma, y, args);
}

}  // namespace

void launch_rms_norm(const RmsNormArgs& args, DType dtype, DType gamma_dtype, const void* x, const void* gamma, void* y,
                     Stream stream) {
  if (args.rows == 0) return;
  visit_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if (gamma_dtype == DType::kFloat32)
      launch_typed(args, in, static_cast<const float*>(gamma), out, stream);
    else
      launch_typed(args, in, static_cast<const T*>(gamma), out, stream);
  });
}

}  // namespace rudnn

ENTRY(run_rms_norm, int64_t rows, int64_t width, float epsilon, int64_t zero_centered, int64_t dtype,
      int64_t gamma_dtype, const void* x, const void* gamma, void* y) {
  const RmsNormArgs args{rows, width, epsilon, static_cast<int32_t>(zero_centered)};
  ENTRY_BODY(rudnn::launch_rms_norm(args, static_cast<rudnn::DType>(dtype), static_cast<rudnn::DType>(gamma_dtype), x,
                                    gamma, y, nullptr));
}
