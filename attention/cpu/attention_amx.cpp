#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include <type_traits>

#include "common/cpu/amx.h"
#include "cpu/attention.h"

namespace rudnn::amx {
namespace {

// The compiler does not know what memory the tiles are loaded from.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

// Products by tiles. Left tiles, which serve one product each in the forward, pass by the first cache and leave it to
// the right ones.
struct Products {
  class Session {
   public:
    Session() { configure_tiles(); }
    ~Session() { release_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // A pair for each 16 rows of the left operand.
  static constexpr int64_t kPauses = 2;

  static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                       int64_t steps, bool add, float* result) {
    multiply(left, row_stride, step_stride, right, steps, add, result, [](auto) {});
  }
  template <class Between>
  [[gnu::always_inline]] static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride,
                                              const bfloat16* right, int64_t steps, bool add, float* result,
                                              Between&& between) {
    finish_stores();
    for (int64_t half = 0; half < 2; ++half) {
      const bfloat16* half_left = left + half * 16 * row_stride;
      float* half_result = result + half * 16 * 32;
      if (add) {
        _tile_loadd(0, half_result, kResultBytes);
        _tile_loadd(1, half_result + 16, kResultBytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
      }
      for (int64_t step = 0; step < steps; ++step) {
        const bfloat16* columns = right + step * 2 * kTileSize;
        _tile_stream_loadd(2, half_left + step * step_stride, 2 * row_stride);
        _tile_loadd(3, columns, 64);
        // Between loads and the product that waits for them, so that neither tiles nor vectors are idle meanwhile.
        between(std::integral_constant<int, 0>());
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(3, columns + kTileSize, 64);
        between(std::integral_constant<int, 1>());
        _tile_dpbf16ps(1, 2, 3);
      }
      _tile_stored(0, half_result, kResultBytes);
      _tile_stored(1, half_result + 16, kResultBytes);
    }
  }

  static void multiply_narrow(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                              int64_t steps, float* result) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < steps; ++step) {
      const bfloat16* rows = left + step * step_stride;
      _tile_loadd(3, right + step * kTileSize, 64);
      _tile_stream_loadd(2, rows, 2 * row_stride);
      _tile_dpbf16ps(0, 2, 3);
      _tile_stream_loadd(2, rows + 16 * row_stride, 2 * row_stride);
      _tile_dpbf16ps(1, 2, 3);
    }
    _tile_stored(0, result, 64);
    _tile_stored(1, result + 16 * 16, 64);
  }

 private:
  static constexpr int64_t kResultBytes = 32 * sizeof(float);
};

}  // namespace
}  // namespace rudnn::amx

#include "cpu/attention_accelerated.inl.h"
#include "cpu/attention_accelerated_backward.inl.h"
#endif
