// The engine as a launcher or a test sees it: options, buffers, errors and traces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {

enum class Order { forward, reverse, random };

// Orders of the schedule, at least one; from RUDNN_SIMT_ORDER, names with commas between them, else forward. The random
// order has a fixed seed.
SIMT_API std::vector<Order>& orders();

// Runs one operator call once in each of orders(), in a BufferScope of its own, and checks the outputs. Throws Error of
// kind order-dependent where a result differs in a bit from that of the first order. `call` registers every buffer
// before it launches; a further order finds in each what the first one found. Calls of several threads take turns.
SIMT_API void run_in_each_order(const std::function<void()>& call);

enum class Access {
  input,    // read only
  update,   // read and written
  output,   // undefined before, every byte written after
  scratch,  // undefined before, may stay unwritten
};
// Global memory that kernels may touch; everything else is out of bounds. Where ranges overlap, the newest counts;
// registering an output or update again, as it is, changes nothing.
SIMT_API void register_buffer(const void* begin, size_t bytes, const char* name, Access access);
// The same for a tensor of PyTorch, whose outermost slices are contiguous but may lie apart.
template <class Tensor>
void register_tensor(const Tensor& tensor, const char* name, Access access) {
  const int64_t slices = tensor.is_contiguous() ? 1 : tensor.size(0);
  const size_t bytes = tensor.numel() * tensor.element_size() / slices;
  const size_t step = slices > 1 ? tensor.stride(0) * tensor.element_size() : 0;
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  for (int64_t slice = 0; slice < slices; ++slice) register_buffer(begin + slice * step, bytes, name, access);
}
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

}  // namespace simt
