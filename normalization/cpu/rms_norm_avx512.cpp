#if defined(__x86_64__)
#include "common/cpu/vec_avx512.h"
#include "cpu/rms_norm.inl.h"
#endif
