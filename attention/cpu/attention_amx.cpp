#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/amx.h"
#include "cpu/attention.h"

namespace rudnn::amx {
namespace {

// The compiler does not know what memory the tiles are loaded from.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

// Products by tiles.
struct Products {
  class Session {
   public:
    Session() { configure_tiles(); }
    ~Session() { release_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Calls of a function between the products of a step.
  static constexpr int64_t kPauses = 2;

  static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                       int64_t steps, bool add, float* result) {
    multiply(left, row_stride, step_stride, right, steps, add, result, [] {});
  }
  template <class Between>
  [[gnu::always_inline]] static void multiply(const bfloat16* left, int64_t row_stride, int64_t step_stride,
                                              const bfloat16* right, int64_t steps, bool add, float* result,
                                              Between&& between) {
    finish_stores();
    if (add) {
      _tile_loadd(0, result, kResultBytes);
      _tile_loadd(1, result + 16, kResultBytes);
      _tile_loadd(2, result + 16 * 32, kResultBytes);
      _tile_loadd(3, result + 16 * 32 + 16, kResultBytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
      const bfloat16* rows = left + step * step_stride;
      const bfloat16* columns = right + step * 2 * kTileSize;
      _tile_loadd(6, columns, 64);
      _tile_loadd(4, rows, 2 * row_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, rows + 16 * row_stride, 2 * row_stride);
      _tile_dpbf16ps(2, 5, 6);
      between();
      _tile_loadd(7, columns + kTileSize, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      between();
    }
    _tile_stored(0, result, kResultBytes);
    _tile_stored(1, result + 16, kResultBytes);
    _tile_stored(2, result + 16 * 32, kResultBytes);
    _tile_stored(3, result + 16 * 32 + 16, kResultBytes);
  }

  static void multiply_narrow(const bfloat16* left, int64_t row_stride, int64_t step_stride, const bfloat16* right,
                              int64_t steps, float* result) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(2);
    for (int64_t step = 0; step < steps; ++step) {
      const bfloat16* rows = left + step * step_stride;
      _tile_loadd(6, right + step * kTileSize, 64);
      _tile_loadd(4, rows, 2 * row_stride);
      _tile_loadd(5, rows + 16 * row_stride, 2 * row_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, result, 64);
    _tile_stored(2, result + 16 * 16, 64);
  }

 private:
  static constexpr int64_t kResultBytes = 32 * sizeof(float);
};

}  // namespace
}  // namespace rudnn::amx

#include "cpu/attention_accelerated.inl.h"
#include "cpu/attention_accelerated_backward.inl.h"
#endif
