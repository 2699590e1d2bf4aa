// common/metal/pipeline.h on the engine; linked into the shared object that holds the translated shaders.
#include "common/metal/pipeline.h"

#include <cstring>
#include <stdexcept>

#include "../engine/host.h"
#include "launch.h"

namespace rudnn::metal {

void Launch::run(Size threadgroups, Size threads) const {
  const auto found = simt::metal::kernels().find(kernel_);
  if (found == simt::metal::kernels().end()) throw std::runtime_error("no Metal kernel is named " + kernel_);
  const simt::metal::Kernel& kernel = found->second;
  for (const simt::metal::Constant& constant : kernel.constants)
    for (const Copy& value : constants_)
      if (value.index == constant.index) memcpy(constant.address, value.data.data(), constant.bytes);

  simt::metal::Bindings bindings;
  for (const Binding& binding : buffers_)
    bindings.buffers.at(binding.index) = static_cast<char*>(binding.storage) + binding.offset;
  for (const Copy& copy : bytes_) {
    bindings.buffers.at(copy.index) = const_cast<unsigned char*>(copy.data.data());
    const std::string name = "buffer(" + std::to_string(copy.index) + ")";
    simt::register_buffer(copy.data.data(), copy.data.size(), name.c_str(), simt::Access::input);
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
  kernel.run(bindings);
}

}  // namespace rudnn::metal
