#include "common/cpu/vec_generic.h"
#include "cpu/layer_norm.inl.h"
