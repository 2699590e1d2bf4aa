// The functions that g++ calls for -fsanitize=thread and -fsanitize=alignment,bounds,shift,integer-divide-by-zero.
#include "state.h"

namespace {

using simt::running;
using simt::Use;

inline void access(const void* p, size_t bytes, Use use, void* pc) {
  if (running && simt::checking) simt::check_access(p, bytes, use, *running, pc);
}

// A run of bytes, or an access that its type does not align, is looked at in units that have no alignment to keep.
void access_range(const void* p, size_t bytes, Use use, void* pc) {
  const size_t unit = bytes % 4 == 0 && reinterpret_cast<uintptr_t>(p) % 4 == 0 ? 4 : 1;
  for (size_t i = 0; i < bytes; i += unit) access(static_cast<const char*>(p) + i, unit, use, pc);
}

// What the compiler knows about an access that its type does not allow, as far as it is used here.
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment;
  unsigned char kind;  // 0 for a load, 1 for a store
};

void undefined(const char* kind, const char* what) {
  if (running) simt::fail(kind, "%s", what);
}

}  // namespace

#define PC __builtin_return_address(0)
#define SIMT_HOOKS(N)                                                    \
  SIMT_API void __tsan_read##N(void* p) { access(p, N, Use::read, PC); } \
  SIMT_API void __tsan_write##N(void* p) { access(p, N, Use::write, PC); }

// Atomics of the host code beside a kernel, such as reference counts.
#define ORDER __ATOMIC_SEQ_CST
#define SIMT_ATOMIC_HOOKS(bits, T)                                                                               \
  SIMT_API T __tsan_atomic##bits##_load(const T* p, int) { return __atomic_load_n(p, ORDER); }                   \
  SIMT_API void __tsan_atomic##bits##_store(T* p, T value, int) { __atomic_store_n(p, value, ORDER); }           \
  SIMT_API T __tsan_atomic##bits##_fetch_add(T* p, T value, int) { return __atomic_fetch_add(p, value, ORDER); } \
  SIMT_API int __tsan_atomic##bits##_compare_exchange_strong(T* p, T* expected, T value, int, int) {             \
    return __atomic_compare_exchange_n(p, expected, value, false, ORDER, ORDER);                                 \
  }

extern "C" {
SIMT_ATOMIC_HOOKS(32, int32_t)
SIMT_ATOMIC_HOOKS(64, int64_t)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
SIMT_API void __tsan_init() {}
SIMT_API void __tsan_vptr_update(void*, void*) {}
SIMT_API void __tsan_read_range(void* p, size_t bytes) { access_range(p, bytes, Use::read, PC); }
SIMT_API void __tsan_write_range(void* p, size_t bytes) { access_range(p, bytes, Use::write, PC); }

SIMT_API void __ubsan_handle_type_mismatch_v1(const TypeMismatch* mismatch, const void* p) {
  if (p) access(p, size_t{1} << mismatch->log_alignment, mismatch->kind == 1 ? Use::write : Use::read, PC);
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
