#include "common/cpu/vec_generic.h"
#include "cpu/selected_router.inl.h"
