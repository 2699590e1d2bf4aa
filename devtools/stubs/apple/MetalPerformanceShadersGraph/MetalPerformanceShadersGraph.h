// What PyTorch's MPS headers use of Metal Performance Shaders Graph, for a syntax check.
#pragma once

#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

@interface MPSGraph : NSObject
@end
@interface MPSGraphExecutionDescriptor : NSObject
@end
@interface MPSGraphCompilationDescriptor : NSObject
@end
