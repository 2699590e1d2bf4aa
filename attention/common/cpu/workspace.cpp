#include "common/cpu/workspace.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/cpu/memory.h"

namespace rudnn::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// The most that outlives a call.
constexpr size_t kKeptBytes = size_t{64} << 20;

// The start of every block, a cache line of it.
struct alignas(64) Header {
  size_t bytes;
};

std::atomic<Header*> kept{nullptr};

Header* allocate(size_t bytes) {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, whole);
  if (memory == nullptr) throw std::bad_alloc();
  advise_huge_pages(memory, whole);
  return new (memory) Header{whole};
}

}  // namespace

Workspace::Workspace(size_t bytes) {
  Header* header = kept.exchange(nullptr);
  if (header == nullptr || header->bytes < bytes + sizeof(Header)) {
    std::free(header);
    header = allocate(bytes + sizeof(Header));
  }
  block_ = header;
  next_ = reinterpret_cast<char*>(header + 1);
#if defined(__SANITIZE_ADDRESS__)
  std::memset(next_, 0xff, bytes);  // NaN in every float type
#endif
}

Workspace::~Workspace() {
  auto* header = static_cast<Header*>(block_);
  if (header->bytes <= kKeptBytes) header = kept.exchange(header);
  std::free(header);
}

}  // namespace rudnn::cpu
