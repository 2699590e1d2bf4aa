// What the header that kernel-builder makes of the compiled shaders declares.
#pragma once

#include <Metal/Metal.h>

namespace family_metal {
id<MTLLibrary> createLibrary(id<MTLDevice> device, NSError** error = nullptr);
}
