// An example of a client of the bench, laid out as an operator of a family. Here: what host and device code agree on.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct RmsNormArgs {
  int64_t rows;
  int64_t width;  // elements of a row, which are contiguous, as are the rows
  float epsilon;
  int32_t zero_centered;  // scale by 1 + gamma
};
