#include "common/cpu/vec_generic.h"
#include "cpu/route_sigmoid_grouped.inl.h"
