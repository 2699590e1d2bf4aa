// The functions that -fsanitize=thread and -fsanitize=alignment,bounds,shift,integer-divide-by-zero call.
#include <cstring>

#include "state.h"

namespace {

using simt::running;

inline void access(const void* p, size_t bytes, bool write, void* pc) {
  if (running && simt::checking) simt::check_access(p, bytes, write, *running, pc);
}

// A run of bytes, or an access that its type does not align, is looked at in units that have no alignment to keep.
void access_range(const void* p, size_t bytes, bool write, void* pc) {
  const size_t unit = bytes % 4 == 0 && reinterpret_cast<uintptr_t>(p) % 4 == 0 ? 4 : 1;
  for (size_t i = 0; i < bytes; i += unit) access(static_cast<const char*>(p) + i, unit, write, pc);
}

void undefined(const char* kind, const char* what) {
  if (running) simt::fail(kind, "%s", what);
}

}  // namespace

#define PC __builtin_return_address(0)
#define SIMT_HOOKS(N)                                                                \
  SIMT_API void __tsan_read##N(void* p) { access(p, N, false, PC); }                 \
  SIMT_API void __tsan_write##N(void* p) { access(p, N, true, PC); }                 \
  SIMT_API void __tsan_volatile_read##N(void* p) { access(p, N, false, PC); }        \
  SIMT_API void __tsan_volatile_write##N(void* p) { access(p, N, true, PC); }        \
  SIMT_API void __tsan_unaligned_read##N(void* p) { access_range(p, N, false, PC); } \
  SIMT_API void __tsan_unaligned_write##N(void* p) { access_range(p, N, true, PC); }

// Atomics of the host code beside a kernel, such as reference counts.
#define SIMT_ATOMIC_HOOKS(bits)                                                                                       \
  using Int##bits = int##bits##_t;                                                                                    \
  SIMT_API Int##bits __tsan_atomic##bits##_load(const Int##bits* p, int) {                                            \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                      \
  }                                                                                                                   \
  SIMT_API void __tsan_atomic##bits##_store(Int##bits* p, Int##bits value, int) {                                     \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                                     \
  }                                                                                                                   \
  SIMT_API Int##bits __tsan_atomic##bits##_fetch_add(Int##bits* p, Int##bits value, int) {                            \
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);                                                            \
  }                                                                                                                   \
  SIMT_API int __tsan_atomic##bits##_compare_exchange_strong(Int##bits* p, Int##bits* expected, Int##bits value, int, \
                                                             int) {                                                   \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
  }

extern "C" {
SIMT_ATOMIC_HOOKS(32)
SIMT_ATOMIC_HOOKS(64)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
SIMT_API void __tsan_init() {}
SIMT_API void __tsan_vptr_update(void*, void*) {}
SIMT_API void __tsan_read_range(void* p, size_t bytes) { access_range(p, bytes, false, PC); }
SIMT_API void __tsan_write_range(void* p, size_t bytes) { access_range(p, bytes, true, PC); }
SIMT_API void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  access_range(from, bytes, false, PC);
  access_range(to, bytes, true, PC);
  return memcpy(to, from, bytes);
}
SIMT_API void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  access_range(from, bytes, false, PC);
  access_range(to, bytes, true, PC);
  return memmove(to, from, bytes);
}
SIMT_API void* __tsan_memset(void* to, int value, size_t bytes) {
  access_range(to, bytes, true, PC);
  return memset(to, value, bytes);
}

SIMT_API void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) {
  undefined("misaligned", "access through a null pointer or one that its type's alignment forbids");
}
SIMT_API void __ubsan_handle_out_of_bounds(void*, uintptr_t) { undefined("bad-index", "array index out of bounds"); }
SIMT_API void __ubsan_handle_shift_out_of_bounds(void*, uintptr_t, uintptr_t) {
  undefined("bad-shift", "shift by a negative amount or by the width of the type or more");
}
SIMT_API void __ubsan_handle_divrem_overflow(void*, uintptr_t, uintptr_t) {
  undefined("bad-division", "integer division by zero or one that overflows");
}
}
