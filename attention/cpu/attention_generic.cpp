#include "common/cpu/vec_generic.h"
#include "cpu/attention.inl.h"
#include "cpu/attention_backward.inl.h"
