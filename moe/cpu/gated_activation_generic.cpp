#include "common/cpu/vec_generic.h"
#include "cpu/gated_activation.inl.h"
