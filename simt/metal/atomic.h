// Relaxed atomics.
#pragma once

#include "../engine/simt.h"
#include "vector.h"

namespace metal {

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

#define SIMT_ATOMIC(name, next)                                                        \
  template <class T>                                                                   \
  SIMT_INLINE T name(atomic<T>* object, std::common_type_t<T> operand, memory_order) { \
    return simt::atomic_update(&object->value, [&](T old) { return next; });           \
  }
SIMT_ATOMIC(atomic_fetch_add_explicit, old + operand)
SIMT_ATOMIC(atomic_fetch_max_explicit, old < operand ? operand : old)
SIMT_ATOMIC(atomic_exchange_explicit, (void(old), operand))
#undef SIMT_ATOMIC

template <class T>
inline T atomic_load_explicit(const atomic<T>* object, memory_order order) {
  return atomic_fetch_add_explicit(const_cast<atomic<T>*>(object), T(0), order);
}
template <class T>
inline void atomic_store_explicit(atomic<T>* object, std::common_type_t<T> value, memory_order order) {
  atomic_exchange_explicit(object, value, order);
}

}  // namespace metal
