#include "common/cpu/vec_generic.h"
#include "common/cpu/widen_row.inl.h"
