// Launches any kernel of the library by name, with up to three buffers.
#include <string>

#include "common/metal/pipeline.h"
#include "simt/tests/kernels/entry.h"

ENTRY(run_kernel, const char* name, int64_t groups, int64_t threads, int64_t threadgroup_bytes, int64_t constant,
      void* first, void* second, void* third) {
  ENTRY_BODY({
    rudnn::metal::Launch launch(name);
    launch.buffer(0, {first}).buffer(1, {second}).buffer(2, {third});
    launch.threadgroup(0, 16).threadgroup(1, static_cast<size_t>(threadgroup_bytes));
    launch.constant(0, static_cast<bool>(constant)).constant(1, static_cast<int32_t>(constant));
    launch.run({static_cast<uint32_t>(groups)}, {static_cast<uint32_t>(threads)});
  });
}

// Launches a kernel of one buffer and one function constant, whose value is of `type`, or missing if that is empty.
ENTRY(run_demanding, const char* type, int64_t constant, int64_t threads, void* y) {
  ENTRY_BODY({
    rudnn::metal::Launch launch("demanding");
    const std::string given = type;
    if (given == "bool") launch.constant(1, constant != 0);
    if (given == "int") launch.constant(1, static_cast<int32_t>(constant));
    if (given == "uint") launch.constant(1, static_cast<uint32_t>(constant));
    if (given == "float") launch.constant(1, static_cast<float>(constant));
    launch.buffer(0, {y}).run({}, {static_cast<uint32_t>(threads)});
  });
}
