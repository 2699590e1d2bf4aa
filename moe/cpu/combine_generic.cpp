#include "common/cpu/vec_generic.h"
#include "cpu/combine.inl.h"
