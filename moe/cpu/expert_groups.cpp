#include "cpu/expert_groups.h"

#include <algorithm>
#include <cstring>

#include "common/cpu/parallel.h"

namespace rudnn {
namespace {

int64_t blocks_of(const ExpertGroup& group) { return cpu::ceil_div(group.end - group.begin, kRowBlock); }

}  // namespace

std::vector<ExpertGroup> groups_of(const int32_t* offsets, int64_t experts, int64_t rows) {
  std::vector<ExpertGroup> groups(experts);
  int64_t next = 0, block = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t begin = std::clamp<int64_t>(offsets[expert], next, rows);
    const int64_t end = std::clamp<int64_t>(offsets[expert + 1], begin, rows);
    groups[expert] = {expert, begin, end, block};
    next = end;
    block += blocks_of(groups[expert]);
  }
  return groups;
}

std::vector<ExpertGroup> groups_of(const Tensor& expert_offsets, int64_t rows) {
  return groups_of(static_cast<const int32_t*>(expert_offsets.const_data_ptr()), expert_offsets.numel() - 1, rows);
}

int64_t blocks_of(const std::vector<ExpertGroup>& groups) {
  return groups.empty() ? 0 : groups.back().first_block + blocks_of(groups.back());
}

void clear_other_rows(const std::vector<ExpertGroup>& groups, const Tensor* output) {
  if (output == nullptr || output->numel() == 0) return;
  const int64_t rows = output->size(0);
  const size_t row_bytes = static_cast<size_t>(output->size(1)) * output->element_size();
  auto* data = static_cast<char*>(output->mutable_data_ptr());
  int64_t next = 0;
  const auto clear_until = [&](int64_t end) { std::memset(data + next * row_bytes, 0, (end - next) * row_bytes); };
  for (const ExpertGroup& group : groups) {
    clear_until(group.begin);
    next = group.end;
  }
  clear_until(rows);
}

}  // namespace rudnn
