// The engine as a launcher or a test sees it: options, buffers, errors and traces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {

enum class Order { forward, reverse, random };

// Read once from RUDNN_SIMT_ORDER (forward, reverse, random), RUDNN_SIMT_SEED and RUDNN_SIMT_CHECK (0, 1).
struct Options {
  Order order = Order::forward;
  uint64_t seed = 1;    // of the random order; the same seed gives the same schedule
  bool checked = true;  // has an effect only on kernels compiled with the checker's hooks
};
SIMT_API Options& options();

enum class Access {
  input,    // read only
  update,   // read and written
  output,   // undefined before, every byte written after
  scratch,  // undefined before, may stay unwritten
};
// Global memory that kernels may touch; everything else is out of bounds. Where ranges overlap, the newest counts.
SIMT_API void register_buffer(const void* begin, size_t bytes, const char* name, Access access);
SIMT_API void check_outputs();  // throws Error of kind unwritten-output
SIMT_API void clear_buffers();

// The buffers of one operator call: whatever is registered during its life is forgotten at its end.
struct BufferScope {
  BufferScope() { clear_buffers(); }
  ~BufferScope() { clear_buffers(); }
  BufferScope(const BufferScope&) = delete;
};

struct SIMT_API Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory accesses of one warp, for performance tables; blocks and warps are counted linearly.
struct TraceRecord {
  enum Kind : uint32_t { global_load, global_store, shared_load, shared_store };
  uint64_t pc, address;
  uint32_t bytes, lane, kind, padding;
};
SIMT_API void start_trace(int block, int warp);
SIMT_API std::vector<TraceRecord> stop_trace();
SIMT_API std::string line_of(uint64_t pc);  // "file:line"

}  // namespace simt
