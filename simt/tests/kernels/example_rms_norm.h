#pragma once

#include "common/cuda/device.cuh"
#include "common/dtype.h"
#include "simt/tests/kernels/example_rms_norm_args.h"

namespace rudnn {

// gamma has the dtype of x or float32. x, y: (rows, width); gamma: (width).
void launch_rms_norm(const RmsNormArgs& args, DType dtype, DType gamma_dtype, const void* x, const void* gamma, void* y,
                     Stream stream);

}  // namespace rudnn
