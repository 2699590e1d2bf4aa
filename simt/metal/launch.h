// From what a launcher binds to the arguments of a kernel. The pre-pass registers each kernel.
#pragma once

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../engine/simt.h"

namespace simt::metal {

// The attributes that ask for a position or a size, by their names.
namespace attributes {
inline Dim3 thread_position_in_grid() {
  const Dim3 thread = thread_index(), group = block_index(), size = block_size();
  return {group.x * size.x + thread.x, group.y * size.y + thread.y, group.z * size.z + thread.z};
}
inline Dim3 threads_per_grid() {
  const Dim3 grid = grid_size(), size = block_size();
  return {grid.x * size.x, grid.y * size.y, grid.z * size.z};
}
inline Dim3 thread_position_in_threadgroup() { return thread_index(); }
inline Dim3 thread_index_in_threadgroup() { return {linear_thread(), 0, 0}; }
inline Dim3 thread_index_in_simdgroup() { return {lane(), 0, 0}; }
inline Dim3 threads_per_threadgroup() { return block_size(); }
inline Dim3 threads_per_simdgroup() { return {kWarpSize, 0, 0}; }
inline Dim3 threadgroup_position_in_grid() { return block_index(); }
inline Dim3 threadgroups_per_grid() { return grid_size(); }
inline Dim3 simdgroup_index_in_threadgroup() { return {warp(), 0, 0}; }
inline Dim3 simdgroups_per_threadgroup() { return {warps_per_block(), 0, 0}; }
}  // namespace attributes

struct Parameter {
  enum Kind { value, buffer, threadgroup_memory } kind;  // "threadgroup" is a macro in shaders
  int index;
  Dim3 (*position)();  // of a value
};

constexpr int kBuffers = 31, kThreadgroupBuffers = 31;
constexpr size_t kThreadgroupLimit = 32 << 10;
struct Bindings {
  std::array<void*, kBuffers> buffers{};
  std::array<size_t, kThreadgroupBuffers> threadgroup_offsets{};
  LaunchShape shape;
};

struct Constant {
  int index;
  void* address;
  size_t bytes;
};
struct Kernel {
  void (*run)(const Bindings&);
  std::vector<Constant> constants;  // of the whole shader
};
// The kernels of this shared object, by host name.
inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> registered;
  return registered;
}
inline bool register_kernel(const char* name, Kernel kernel) {
  return kernels().emplace(name, std::move(kernel)).second;
}

template <class T>
T from_dim(Dim3 dim) {
  const uint32_t parts[] = {dim.x, dim.y, dim.z};
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(dim.x);
  } else {
    T vector;
    for (size_t i = 0; i < sizeof vector.v / sizeof vector.v[0]; ++i) vector.v[i] = parts[i];
    return vector;
  }
}

template <class P>
P argument(const Parameter& parameter, const Bindings& bindings) {
  if constexpr (std::is_reference_v<P>) {
    return *static_cast<std::remove_reference_t<P>*>(bindings.buffers[parameter.index]);
  } else if constexpr (std::is_pointer_v<P>) {
    void* address = parameter.kind == Parameter::threadgroup_memory
                        ? dynamic_shared() + bindings.threadgroup_offsets[parameter.index]
                        : bindings.buffers[parameter.index];
    return static_cast<P>(address);
  } else {
    return from_dim<std::remove_cv_t<P>>(parameter.position());
  }
}

template <class... P, size_t... I>
std::tuple<P...> arguments(const Parameter* parameters, const Bindings& bindings, std::index_sequence<I...>) {
  Unchecked emulated;
  return {argument<P>(parameters[I], bindings)...};
}

template <class... P>
void run(void (*kernel)(P...), const Parameter* parameters, const Bindings& bindings) {
  const auto thread = [kernel, parameters, &bindings] {
    std::apply(kernel, arguments<P...>(parameters, bindings, std::index_sequence_for<P...>()));
  };
  run_grid_of(bindings.shape, reinterpret_cast<const void*>(kernel), thread);
}

}  // namespace simt::metal
