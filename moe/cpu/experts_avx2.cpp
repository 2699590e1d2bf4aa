#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx2.h"
#include "cpu/experts.inl.h"
#include "cpu/experts_backward.inl.h"
#endif
