#include "cpu/dispatch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/cpu/memory.h"
#include "common/cpu/parallel.h"
#include "cpu/sum_rows.h"
#include "cpu/tensor_indices.h"
#include "ops/dispatch.h"

namespace rudnn {
namespace {

bool has_row(const SlotSort& sort, int64_t expert) { return expert >= 0 && expert < sort.experts; }

// counts[e] = the slots of [begin, end) that chose expert e.
void count_slots(const SlotSort& sort, int64_t begin, int64_t end, int32_t* counts) {
  std::fill_n(counts, sort.experts, 0);
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t expert = sort.indices[slot];
    if (has_row(sort, expert)) ++counts[expert];
  }
}

// Gives the slots of [begin, end) their rows; next_rows[e] is the next free row of expert e.
void place_slots(const SlotSort& sort, int64_t begin, int64_t end, int32_t* next_rows) {
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t expert = sort.indices[slot];
    if (!has_row(sort, expert)) {
      sort.slot_rows[slot] = -1;
      continue;
    }
    const int32_t row = next_rows[expert]++;
    sort.slot_rows[slot] = row;
    sort.row_slots[row] = static_cast<int32_t>(slot);
    if (sort.row_experts != nullptr) sort.row_experts[row] = static_cast<int32_t>(expert);
    if (sort.row_tokens != nullptr) sort.row_tokens[row] = static_cast<int32_t>(slot / sort.top_k);
  }
}

// Leaves the rows that are nobody's without a slot.
void clear_rest(const SlotSort& sort) {
  const int64_t used = sort.expert_offsets[sort.experts];
  for (int32_t* map : {sort.row_experts, sort.row_tokens, sort.row_slots}) {
    if (map != nullptr) std::fill(map + used, map + sort.slots, -1);
  }
}

// Slots that are counted and placed together. So many that the counters of a chunk do not outgrow its slots.
int64_t chunk_slots(const SlotSort& sort) { return std::max(cpu::kParallelElements / 2, 4 * sort.experts); }

}  // namespace

void sort_slots(const SlotSort& sort) {
  const int64_t chunk = chunk_slots(sort);
  const int64_t chunks = std::max(int64_t{1}, cpu::ceil_div(sort.slots, chunk));
  const auto for_each_chunk = [&](const auto& body) {
    cpu::parallel_for(chunks, chunk, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) body(c, c * chunk, std::min(sort.slots, (c + 1) * chunk));
    });
  };
  std::vector<int32_t> counters(chunks * sort.experts);
  for_each_chunk([&](int64_t c, int64_t begin, int64_t end) {
    count_slots(sort, begin, end, counters.data() + c * sort.experts);
  });
  // Counts become the first rows.
  int32_t row = 0;
  for (int64_t expert = 0; expert < sort.experts; ++expert) {
    sort.expert_offsets[expert] = row;
    for (int64_t c = 0; c < chunks; ++c) {
      int32_t& counter = counters[c * sort.experts + expert];
      const int32_t count = counter;
      counter = row;
      row += count;
    }
  }
  sort.expert_offsets[sort.experts] = row;
  for_each_chunk([&](int64_t c, int64_t begin, int64_t end) {
    place_slots(sort, begin, end, counters.data() + c * sort.experts);
  });
  clear_rest(sort);
}

void launch_dispatch(const DispatchCall& call) {
  const auto map = [](const Tensor* tensor) { return static_cast<int32_t*>(tensor->mutable_data_ptr()); };
  SlotSort sort;
  sort.indices = indices_of(*call.indices);
  sort.slots = call.indices->numel();
  sort.top_k = call.indices->size(1);
  sort.experts = call.map.expert_offsets->numel() - 1;
  sort.expert_offsets = map(call.map.expert_offsets);
  sort.row_experts = map(call.map.row_experts);
  sort.row_tokens = map(call.map.row_tokens);
  sort.row_slots = map(call.map.row_slots);
  sort.slot_rows = map(call.map.slot_rows);
  sort_slots(sort);

  const int64_t width = call.input->size(1);
  if (width == 0) return;
  const size_t row_bytes = width * call.input->element_size();
  const auto* input = static_cast<const char*>(call.input->const_data_ptr());
  auto* values = static_cast<char*>(call.values->mutable_data_ptr());
  cpu::advise_huge_pages(call.values);
  cpu::parallel_for(sort.slots, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = sort.row_tokens[row];
      if (token >= 0) {
        std::memcpy(values + row * row_bytes, input + token * row_bytes, row_bytes);
      } else {
        std::memset(values + row * row_bytes, 0, row_bytes);
      }
    }
  });
}

void launch_dispatch_backward(const DispatchBackwardCall& call) {
  sum_rows(*call.grad_values, nullptr, *call.slot_rows, *call.grad_input);
}

}  // namespace rudnn
