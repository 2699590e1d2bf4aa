// The engine for ctypes: orders and buffers.
#include "simt/tests/kernels/entry.h"

ENTRY(simt_set_order, int64_t order) { ENTRY_BODY(simt::orders() = {static_cast<simt::Order>(order)}); }
ENTRY(simt_register_buffer, const void* begin, int64_t bytes, const char* name, int64_t access) {
  ENTRY_BODY(simt::register_buffer(begin, static_cast<size_t>(bytes), name, static_cast<simt::Access>(access)));
}
ENTRY(simt_check_outputs) { ENTRY_BODY(simt::check_outputs()); }
ENTRY(simt_clear_buffers) { ENTRY_BODY(simt::clear_buffers()); }
