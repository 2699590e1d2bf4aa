// What Objective-C++ sources and PyTorch's MPS headers use of Grand Central Dispatch, for a syntax check.
#pragma once

#include <cstddef>

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;
typedef void (^dispatch_block_t)(void);

extern "C" void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
extern "C" dispatch_queue_t dispatch_get_main_queue(void);
extern "C" dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t queue,
                                                dispatch_block_t destructor);
