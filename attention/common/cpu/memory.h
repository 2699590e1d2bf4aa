// Page size advice for large fresh memory.
#pragma once

#include <cstddef>

#include "common/tensor.h"

namespace rudnn::cpu {

// Asks for huge pages behind memory that is about to be written for the first time. Does nothing where the system has
// no such advice.
void advise_huge_pages(void* memory, size_t bytes);

// The same for an output of 32 MiB or more: from there on, allocators map fresh memory for each tensor and the page
// faults cost more than the arithmetic; below, the advice costs more than it saves. Does nothing for a null output.
void advise_huge_pages(const Tensor* output);

}  // namespace rudnn::cpu
