#include "common/compensated_sum.h"
#include "metal/parameter_sums_args.h"
#include "metal/row.h"

using namespace metal;
using namespace rudnn;

// sums [width] = partials [count, width] summed over the first axis. The kSumColumns x kSumShares threads of a
// threadgroup share out the rows of kSumColumns columns.
[[kernel]] void sum_partials(constant ParameterSumsArgs& args [[buffer(kSumsArgsBuffer)]],
                             device const float* partials [[buffer(kPartialsBuffer)]],
                             device float* sums [[buffer(kSumsBuffer)]], uint2 group [[threadgroup_position_in_grid]],
                             uint2 position [[thread_position_in_threadgroup]]) {
  threadgroup float values[kSumShares][kSumColumns];
  threadgroup float lost[kSumShares][kSumColumns];
  const long column = long(group.x) * kSumColumns + position.x;
  CompensatedSum sum = {0.0f, 0.0f};
  if (column < args.width)
    for (long row = position.y; row < args.count; row += kSumShares)
      sum = added(sum, partials[row * args.width + column]);
  values[position.y][position.x] = sum.value;
  lost[position.y][position.x] = sum.lost;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (position.y != 0 || column >= args.width) return;
  for (int share = 1; share < kSumShares; ++share)
    sum = added(sum, CompensatedSum{values[share][position.x], lost[share][position.x]});
  sums[column] = rounded(sum);
}
