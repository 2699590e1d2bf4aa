#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx2.h"
#include "common/cpu/widen_row.inl.h"
#endif
