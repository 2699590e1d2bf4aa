#include "common/cpu/isa.h"

#if RUDNN_X86_ISAS
#include "common/cpu/vec_avx512.h"
#include "cpu/attention.inl.h"
#include "cpu/attention_backward.inl.h"
#endif
