#include "common/cpu/tiles.h"

#include "common/cpu/dispatch.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rudnn::cpu {

bool has_tiles() {
#if RUDNN_X86_ISAS && defined(__linux__)
  // The system wants to be asked once.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool granted = isa() >= Isa::kAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace rudnn::cpu
