// common/metal/pipeline.h on the engine; linked into the shared object that holds the translated shaders.
#include "common/metal/pipeline.h"

#include <pmmintrin.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../engine/host.h"
#include "launch.h"

namespace rudnn::metal {

namespace {

[[noreturn]] void refuse(const std::string& kernel, const std::string& reason) {
  throw simt::Error("bad-launch of " + kernel + ": " + reason);
}

std::string described(const simt::metal::Constant& constant) {
  return "function constant " + std::to_string(constant.index) + ", " + constant.name + ", ";
}

// For its life subnormal float32 numbers count as zero, in operands and in results: Metal permits it, and Apple's GPUs
// do so. half has its subnormal numbers there and here.
class FlushedSubnormals {
 public:
  FlushedSubnormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushedSubnormals() { _mm_setcsr(before_); }
  FlushedSubnormals(const FlushedSubnormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

}  // namespace

void Launch::run(Size threadgroups, Size threads) const {
  const auto found = simt::metal::kernels().find(kernel_);
  if (found == simt::metal::kernels().end()) throw std::runtime_error("no Metal kernel is named " + kernel_);
  const simt::metal::Kernel& kernel = found->second;
  const uint64_t threads_at_once = uint64_t{threads.x} * threads.y * threads.z;
  if (threads_at_once > kernel.most_threads) {
    refuse(kernel_, std::to_string(threads_at_once) + " threads in a threadgroup, where the kernel allows " +
                        std::to_string(kernel.most_threads));
  }
  for (const simt::metal::Constant& constant : kernel.constants) {
    const auto given = std::find_if(constants_.begin(), constants_.end(),
                                    [&](const Copy& value) { return value.index == constant.index; });
    if (given == constants_.end()) refuse(kernel_, described(constant) + "has no value");
    constexpr const char* kTypes[] = {"bool", "int", "uint", "float"};  // of ConstantType
    const std::string type = kTypes[static_cast<int>(constant_types_[given - constants_.begin()])];
    if (type != constant.type) refuse(kernel_, described(constant) + "is " + constant.type + ", got " + type);
    memcpy(constant.address, given->data.data(), constant.bytes);
  }

  simt::metal::Bindings bindings;
  for (const Binding& binding : buffers_)
    bindings.buffers.at(binding.index) = static_cast<char*>(binding.storage) + binding.offset;
  for (const Copy& copy : bytes_) {
    bindings.buffers.at(copy.index) = const_cast<unsigned char*>(copy.data.data());
    const std::string name = "buffer(" + std::to_string(copy.index) + ")";
    simt::register_buffer(copy.data.data(), copy.data.size(), name.c_str(), simt::Access::input);
  }
  for (const simt::metal::Buffer& buffer : kernel.buffers) {
    if ((buffer.is_declared == nullptr || *buffer.is_declared) && bindings.buffers.at(buffer.index) == nullptr)
      refuse(kernel_, "buffer " + std::to_string(buffer.index) + " is not bound");
  }
  size_t shared_bytes = 0;
  for (const Binding& binding : threadgroup_) {
    bindings.threadgroup_offsets.at(binding.index) = shared_bytes;
    shared_bytes += (binding.offset + 15) / 16 * 16;
  }
  bindings.shape.grid = {threadgroups.x, threadgroups.y, threadgroups.z};
  bindings.shape.block = {threads.x, threads.y, threads.z};
  bindings.shape.shared_bytes = shared_bytes;
  bindings.shape.shared_limit = simt::metal::kThreadgroupLimit;
  const FlushedSubnormals flushed;
  kernel.run(bindings);
}

}  // namespace rudnn::metal
