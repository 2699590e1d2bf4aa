// Launching a Metal kernel from plain C++. On the bench Launch::run is simt/metal/pipeline.cpp; the one for Metal,
// pipeline.mm, is not written yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rudnn::metal {

struct Size {
  uint32_t x = 1, y = 1, z = 1;
};

class Launch {
 public:
  explicit Launch(const char* kernel) : kernel_(kernel) {}

  // [[buffer(index)]]: memory at a byte offset in `storage`, which is an id<MTLBuffer>, on the bench an address.
  Launch& buffer(int index, void* storage, size_t offset) {
    buffers_.push_back({index, storage, offset});
    return *this;
  }
  // [[buffer(index)]]: a copy of a struct, in the constant address space.
  template <class T>
  Launch& bytes(int index, const T& value) {
    bytes_.push_back(copy_of(index, &value, sizeof value));
    return *this;
  }
  // [[function_constant(index)]]: part of the pipeline, so a new value compiles a new one.
  template <class T>
  Launch& constant(int index, T value) {
    constants_.push_back(copy_of(index, &value, sizeof value));
    return *this;
  }
  // [[threadgroup(index)]]: memory of each threadgroup.
  Launch& threadgroup(int index, size_t bytes) {
    threadgroup_.push_back({index, nullptr, bytes});
    return *this;
  }

  // Starts the kernel. Throws std::runtime_error if it does not exist or the launch is refused.
  void run(Size threadgroups, Size threads) const;

 private:
  struct Binding {
    int index;
    void* storage;
    size_t offset;  // of a buffer; the size of threadgroup memory
  };
  struct Copy {
    int index;
    std::vector<unsigned char> data;
  };
  static Copy copy_of(int index, const void* value, size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(value);
    return {index, {begin, begin + bytes}};
  }

  const char* kernel_;
  std::vector<Binding> buffers_, threadgroup_;
  std::vector<Copy> bytes_, constants_;
};

}  // namespace rudnn::metal
