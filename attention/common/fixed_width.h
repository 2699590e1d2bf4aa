// Integers of fixed width, for what launchers and device code agree on.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif
