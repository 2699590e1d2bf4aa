// What launcher and shader of sum_partials agree on.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace rudnn {

struct ParameterSumsArgs {
  int64_t count;  // of partial rows
  int64_t width;
};

}  // namespace rudnn
