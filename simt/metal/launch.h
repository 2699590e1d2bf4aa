// From what a launcher binds to the arguments of a kernel. The pre-pass registers each kernel.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../engine/simt.h"

namespace simt::metal {

template <class T>
using Same = T;

// A bound address as an argument of any pointer or reference type.
struct Address {
  void* address;
  template <class T>
  operator T*() const {
    return static_cast<T*>(address);
  }
  template <class T>
  operator T&() const {
    return *static_cast<T*>(address);
  }
};

// A position or a size as an argument of any scalar or vector type.
struct Position : Dim3 {
  template <class T>
  operator T() const {
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<T>(x);
    } else {
      const uint32_t parts[] = {x, y, z};
      T vector;
      std::copy_n(parts, std::size(vector.v), vector.v);
      return vector;
    }
  }
};

// The attributes that ask for a position or a size, by their names.
namespace attributes {
inline Position thread_position_in_grid() {
  const Dim3 thread = thread_index(), group = block_index(), size = block_size();
  return {{group.x * size.x + thread.x, group.y * size.y + thread.y, group.z * size.z + thread.z}};
}
inline Position threads_per_grid() {
  const Dim3 grid = grid_size(), size = block_size();
  return {{grid.x * size.x, grid.y * size.y, grid.z * size.z}};
}
inline Position thread_position_in_threadgroup() { return {thread_index()}; }
inline Position thread_index_in_threadgroup() { return {{linear_thread(), 0, 0}}; }
inline Position thread_index_in_simdgroup() { return {{lane(), 0, 0}}; }
inline Position threads_per_threadgroup() { return {block_size()}; }
inline Position threads_per_simdgroup() { return {{kWarpSize, 0, 0}}; }
inline Position threadgroup_position_in_grid() { return {block_index()}; }
inline Position threadgroups_per_grid() { return {grid_size()}; }
inline Position simdgroup_index_in_threadgroup() { return {{warp(), 0, 0}}; }
inline Position simdgroups_per_threadgroup() { return {{warps_per_block(), 0, 0}}; }
}  // namespace attributes

constexpr size_t kThreadgroupLimit = 32 << 10;
// Threads hold a copy, which the checker takes for parameters of the kernel.
struct Bindings {
  std::array<void*, 31> buffers{};
  std::array<size_t, 31> threadgroup_offsets{};
  LaunchShape shape;

  Address buffer(int index) const { return {buffers[index]}; }
  Address threadgroup_memory(int index) const { return {dynamic_shared() + threadgroup_offsets[index]}; }
};

constexpr unsigned kMostThreads = 1024;  // of a threadgroup, where the kernel sets no limit of its own

template <class T>
constexpr const char* name_of_type() {
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, int>) return "int";
  if constexpr (std::is_same_v<T, unsigned>) return "uint";
  if constexpr (std::is_same_v<T, float>) return "float";
}

struct Constant {
  int index;
  const char* name;
  const char* type;  // as of name_of_type
  void* address;
  size_t bytes;
};
template <class T>
Constant constant_at(int index, const char* name, T& constant) {
  return {index, name, name_of_type<T>(), &constant, sizeof constant};
}

struct Buffer {
  int index;
  const bool* is_declared;  // a function constant; null if the buffer is always there
};

struct Kernel {
  void (*run)(const Bindings&);
  unsigned most_threads;            // of a threadgroup
  std::vector<Constant> constants;  // that the kernel's code names
  std::vector<Buffer> buffers;
};
// The kernels of this shared object, by host name.
inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> registered;
  return registered;
}
inline bool register_kernel(const char* name, Kernel kernel) {
  return kernels().emplace(name, std::move(kernel)).second;
}

// Launches `kernel`, which each thread starts by calling `thread`.
template <class... P, class F>
void run(void (*kernel)(P...), const Bindings& bindings, const F& thread) {
  run_grid_of(bindings.shape, reinterpret_cast<const void*>(kernel), thread);
}

}  // namespace simt::metal
