// What PyTorch's MPS headers use of Metal Performance Shaders, for a syntax check.
#pragma once

#include <Metal/Metal.h>

@interface MPSCommandBuffer : NSObject
@end
