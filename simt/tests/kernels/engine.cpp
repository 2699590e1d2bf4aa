// The engine for ctypes: options, buffers and traces.
#include "simt/tests/kernels/entry.h"

ENTRY(simt_set_options, int64_t order, int64_t seed, int64_t checked) {
  ENTRY_BODY(simt::options() = {static_cast<simt::Order>(order), static_cast<uint64_t>(seed), checked != 0});
}
ENTRY(simt_register_buffer, const void* begin, int64_t bytes, const char* name, int64_t access) {
  ENTRY_BODY(simt::register_buffer(begin, static_cast<size_t>(bytes), name, static_cast<simt::Access>(access)));
}
ENTRY(simt_check_outputs) { ENTRY_BODY(simt::check_outputs()); }
ENTRY(simt_clear_buffers) { ENTRY_BODY(simt::clear_buffers()); }

static std::vector<simt::TraceRecord> trace;

ENTRY(simt_start_trace, int64_t block, int64_t warp) {
  ENTRY_BODY(simt::start_trace(static_cast<int>(block), static_cast<int>(warp)));
}
extern "C" SIMT_API int64_t simt_stop_trace(const void** records) {
  trace = simt::stop_trace();
  *records = trace.data();
  return static_cast<int64_t>(trace.size());
}
extern "C" SIMT_API const char* simt_line_of(uint64_t pc) { return keep_text(simt::line_of(pc)); }
