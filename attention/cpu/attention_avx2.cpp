#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx2.h"
#include "cpu/attention.inl.h"
#include "cpu/attention_backward.inl.h"
#endif
