// Launching a Metal kernel from plain C++. Launch::run is pipeline.mm on Apple's devices, where it starts the kernel on
// PyTorch's MPS stream and does not wait, and simt/metal/pipeline.cpp on the bench.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace rudnn::metal {

struct Size {
  uint32_t x = 1, y = 1, z = 1;
};

// A byte offset in `storage`, which is an id<MTLBuffer>, on the bench an address. None if that is null.
struct Memory {
  void* storage = nullptr;
  size_t offset = 0;
};

class Launch {
 public:
  explicit Launch(std::string kernel) : kernel_(std::move(kernel)) {}

  // [[buffer(index)]], which stays unbound if there is no memory.
  Launch& buffer(int index, const Memory& memory) {
    if (memory.storage != nullptr) buffers_.push_back({index, memory.storage, memory.offset});
    return *this;
  }
  // [[buffer(index)]]: a copy of a struct, in the constant address space.
  template <class T>
  Launch& bytes(int index, const T& value) {
    bytes_.push_back(copy_of(index, &value, sizeof value));
    return *this;
  }
  // [[function_constant(index)]]: part of the pipeline, so a new value compiles a new one. T is bool, int32_t, uint32_t
  // or float, the shader's type.
  template <class T>
  Launch& constant(int index, T value) {
    constants_.push_back(copy_of(index, &value, sizeof value));
    constant_types_.push_back(type_of<T>());
    return *this;
  }
  // [[threadgroup(index)]]: memory of each threadgroup.
  Launch& threadgroup(int index, size_t bytes) {
    threadgroup_.push_back({index, nullptr, bytes});
    return *this;
  }

  // Starts the kernel. Throws std::runtime_error if it does not exist or the launch is refused, as an empty grid is.
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
  enum class ConstantType : char { kBool, kInt, kUInt, kFloat };
  template <class T>
  static constexpr ConstantType type_of() {
    if constexpr (std::is_same_v<T, bool>) {
      return ConstantType::kBool;
    } else if constexpr (std::is_same_v<T, int32_t>) {
      return ConstantType::kInt;
    } else if constexpr (std::is_same_v<T, uint32_t>) {
      return ConstantType::kUInt;
    } else {
      static_assert(std::is_same_v<T, float>, "a function constant is bool, int32_t, uint32_t or float");
      return ConstantType::kFloat;
    }
  }
  static Copy copy_of(int index, const void* value, size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(value);
    return {index, {begin, begin + bytes}};
  }

  class Pipelines;  // of pipeline.mm

  std::string kernel_;
  std::vector<Binding> buffers_, threadgroup_;
  std::vector<Copy> bytes_, constants_;
  std::vector<ConstantType> constant_types_;
};

}  // namespace rudnn::metal
