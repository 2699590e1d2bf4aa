#include "common/cpu/vec_generic.h"
#include "cpu/experts.inl.h"
#include "cpu/experts_backward.inl.h"
