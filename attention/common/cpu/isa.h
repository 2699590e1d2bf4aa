// Which instruction sets are compiled besides the generic code.
#pragma once

// AVX2 and AVX-512. They rely on GCC's target pragma. Clang and other processors get the
// generic code alone.
#if defined(__x86_64__) && !defined(__clang__)
#define RUDNN_X86_ISAS 1
#else
#define RUDNN_X86_ISAS 0
#endif
