#include "common/cpu/vec_generic.h"
#include "cpu/route.inl.h"
