#include "common/cpu/vec_generic.h"
#include "cpu/rms_norm.inl.h"
