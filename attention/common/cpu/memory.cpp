#include "common/cpu/memory.h"

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace rudnn::cpu {

void advise_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first_page = (begin + page - 1) / page * page;
  const uintptr_t last_page = (begin + bytes) / page * page;
  if (first_page < last_page) madvise(reinterpret_cast<void*>(first_page), last_page - first_page, MADV_HUGEPAGE);
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
#endif
}

void advise_huge_pages(const Tensor* output) {
  if (output == nullptr) return;
  constexpr size_t kLeastBytes = size_t{32} << 20;
  const size_t bytes = static_cast<size_t>(extent_of(*output)) * output->element_size();
  if (bytes >= kLeastBytes) advise_huge_pages(output->mutable_data_ptr(), bytes);
}

}  // namespace rudnn::cpu
