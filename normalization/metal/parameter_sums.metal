#include "metal/parameter_sums_args.h"
#include "metal/row.h"

using namespace metal;
using namespace rudnn;

// A sum, and what its roundings have lost: a column may have a thousand partial sums that nearly cancel.
struct Sum {
  float value;
  float lost;
};
inline Sum added(Sum sum, float x) {
  const float value = sum.value + x;
  const float moved = value - sum.value;
  return {value, sum.lost + ((sum.value - (value - moved)) + (x - moved))};
}
inline float rounded(Sum sum) { return is_finite(sum.lost) ? sum.value + sum.lost : sum.value; }

// sums [width] = partials [count, width] summed over the first axis. The kSumColumns x kSumShares threads of a
// threadgroup share out the rows of kSumColumns columns.
[[kernel]] void sum_partials(constant ParameterSumsArgs& args [[buffer(0)]], device const float* partials [[buffer(1)]],
                             device float* sums [[buffer(2)]], uint2 group [[threadgroup_position_in_grid]],
                             uint2 position [[thread_position_in_threadgroup]]) {
  threadgroup Sum shares[kSumShares][kSumColumns];
  const long column = long(group.x) * kSumColumns + position.x;
  Sum sum = {0.0f, 0.0f};
  if (column < args.width)
    for (long row = position.y; row < args.count; row += kSumShares)
      sum = added(sum, partials[row * args.width + column]);
  shares[position.y][position.x] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (position.y != 0 || column >= args.width) return;
  for (int share = 1; share < kSumShares; ++share) {
    const Sum other = shares[share][position.x];
    sum = added(sum, other.value);
    sum.lost += other.lost;
  }
  sums[column] = rounded(sum);
}
