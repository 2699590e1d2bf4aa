#include "common/cpu/vec_generic.h"
#include "cpu/softmax_last_axis.inl.h"
