#if defined(__x86_64__)
#include "common/cpu/vec_avx512.h"
#include "cpu/layer_norm.inl.h"
#endif
