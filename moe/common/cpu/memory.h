// Page size advice for large fresh outputs.
#pragma once

#include "common/tensor.h"

namespace rudnn::cpu {

// Asks for huge pages behind an output that is about to be written for the first time. From 32 MiB on, allocators map
// fresh memory for each tensor and the page faults cost more than the arithmetic; below, the advice costs more than it
// saves. Does nothing for a null output, or where the system has no such advice.
void advise_huge_pages(const Tensor* output);

}  // namespace rudnn::cpu
