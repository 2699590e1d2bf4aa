#include <algorithm>

#include "common/metal/pipeline.h"
#include "simt/tests/kernels/entry.h"
#include "simt/tests/kernels/example_rms_norm_args.h"

namespace {

// `kernel` is a host name of example_rms_norm.metal. x, y: (rows, width); gamma: (width).
void launch_rms_norm(const RmsNormArgs& args, const char* kernel, void* x, void* gamma, void* y) {
  if (args.rows == 0) return;
  // Whole simdgroups, no more threads than elements need.
  const int64_t threads = std::min<int64_t>((args.width + 31) / 32 * 32, 256);
  rudnn::metal::Launch(kernel)
      .buffer(0, {x})
      .buffer(1, {gamma})
      .buffer(2, {y})
      .bytes(3, args)
      .run({static_cast<uint32_t>(args.rows)}, {static_cast<uint32_t>(threads)});
}

}  // namespace

ENTRY(run_rms_norm, int64_t rows, int64_t width, float epsilon, const char* kernel, void* x, void* gamma, void* y) {
  ENTRY_BODY(launch_rms_norm({rows, width, epsilon, 0}, kernel, x, gamma, y));
}
