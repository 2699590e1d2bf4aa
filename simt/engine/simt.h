// The engine as the CUDA and Metal dialects see it: what one kernel thread can ask, and how threads meet.
#pragma once

#include <cstddef>
#include <cstdint>

#define SIMT_API __attribute__((visibility("default")))
#define SIMT_INLINE inline __attribute__((always_inline))

// Whether this translation unit is compiled with -fsanitize=thread, whose hooks the engine provides.
#ifdef __SANITIZE_THREAD__
#define SIMT_HAS_HOOKS true
#else
#define SIMT_HAS_HOOKS false
#endif

namespace simt {

constexpr int kWarpSize = 32;

struct Dim3 {
  uint32_t x, y, z;
};

// Where a call is written in the kernel. Threads meet only when they wait at the same site.
struct Site {
  const char* file;
  int line;
  bool operator!=(const Site& other) const { return line != other.line || file != other.file; }
};
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// The running thread. A call of a kernel never changes thread, so the compiler may reuse the answers.
#define SIMT_QUERY SIMT_API __attribute__((const))
SIMT_QUERY Dim3 thread_index();
SIMT_QUERY Dim3 block_index();
SIMT_QUERY Dim3 block_size();
SIMT_QUERY Dim3 grid_size();
SIMT_QUERY uint32_t linear_thread();  // x fastest, then y, then z
SIMT_QUERY uint32_t lane();
SIMT_QUERY uint32_t warp();
SIMT_QUERY uint32_t warps_per_block();
SIMT_QUERY unsigned char* dynamic_shared();
SIMT_API uint32_t live_lanes();  // lanes of this warp that have not returned

// Ends the launch with an error of `kind`, located at the kernel line that is executing.
[[noreturn]] SIMT_API void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Static shared memory. Every such variable lies in the thread-local segment of the kernel's shared object, which
// gives the checker one address range; __constinit keeps g++ from adding a guard variable for class types.
#define SIMT_STATIC_SHARED static __constinit thread_local

// One meeting of the lanes in `mask`. `combine` reads every lane's input and writes every lane's output.
struct WarpCall {
  uint32_t mask;
  uint32_t arrived;
  void (*combine)(const WarpCall&);
  const char* name;
  Site site;
  const void* inputs[kWarpSize];
  void* outputs[kWarpSize];

  template <class T>
  const T& in(int lane) const {
    return *static_cast<const T*>(inputs[lane]);
  }
  template <class T>
  T& out(int lane) const {
    return *static_cast<T*>(outputs[lane]);
  }
  bool has(int lane) const { return lane >= 0 && lane < kWarpSize && (mask >> lane & 1); }
  template <class F>
  void for_each_lane(F visit) const {
    for (uint32_t rest = mask; rest; rest &= rest - 1) visit(__builtin_ctz(rest));
  }
};
using Combine = void (*)(const WarpCall&);

// The primitive under every warp-wide operation: the last lane of `mask` to arrive runs `combine` once for all.
// Orders no memory.
SIMT_API void warp_collective(uint32_t mask, const void* in, void* out, Combine combine, const char* name, Site site);
SIMT_API void warp_barrier(uint32_t mask, const char* name, Site site);  // orders memory among the lanes

// The two sides of a shuffle: what a lane brings, and whose value it takes.
template <class T>
struct Shuffled {
  T value;
  int source;
};
// A source that takes no part is an error if kStrict; else the lane keeps its own value.
template <class T, bool kStrict>
void combine_shuffle(const WarpCall& call) {
  call.for_each_lane([&](int lane) {
    const int source = call.in<Shuffled<T>>(lane).source;
    if (kStrict && !call.has(source))
      fail("divergent-warp", "%s: lane %d reads lane %d, which is not in mask %08x", call.name, lane, source,
           call.mask);
    call.out<T>(lane) = call.in<Shuffled<T>>(call.has(source) ? source : lane).value;
  });
}

// Memory that a block barrier orders.
enum Fence : unsigned { kFenceNone = 0, kFenceShared = 1, kFenceGlobal = 2, kFenceAll = 3 };
SIMT_API void block_barrier(Fence fence, const char* name, Site site);
// Barriers 1 to 15 among `count` threads, a multiple of the warp size; an arrival alone does not wait.
SIMT_API void named_barrier(int id, int count, bool wait, const char* name);

// Asynchronous copies of one thread. Delivered as late as the waits allow; the target reads as NaN until then.
SIMT_API void copy_async(void* shared, const void* global, int bytes, int valid_bytes);
SIMT_API void copy_async_commit();
SIMT_API void copy_async_wait(int groups_left);

// Barrier objects in shared memory. A phase ends after `count` arrivals and as many copied bytes as were announced.
SIMT_API void mbarrier_init(void* barrier, int count);
SIMT_API void mbarrier_arrive(void* barrier, int announced_bytes);
SIMT_API void mbarrier_wait(void* barrier, int parity);
SIMT_API void bulk_copy(void* shared, const void* global, int bytes, void* barrier);

// Accesses made on behalf of a lane by code that the checker does not see. Atomics do not race with each other.
SIMT_API void touch_read(const void* address, size_t bytes, int lane);
SIMT_API void touch_atomic(const void* address, size_t bytes);
// Turns the access checks off for the code of an emulated instruction.
struct SIMT_API Unchecked {
  Unchecked();
  ~Unchecked();

 private:
  bool before_;
};

// Atomics are exact as plain code, because fibers switch only inside the engine.
template <class T, class F>
SIMT_INLINE T atomic_update(T* address, F next) {
  touch_atomic(address, sizeof(T));
  Unchecked emulated;
  const T old = *address;
  *address = next(old);
  return old;
}

struct LaunchShape {
  Dim3 grid, block;
  size_t shared_bytes = 0;
  size_t shared_limit = 0;
  bool has_hooks = SIMT_HAS_HOOKS;
};
// Runs `entry(args)` once per thread of the grid, and throws simt::Error (host.h) on the first fault.
SIMT_API void run_grid(const LaunchShape& shape, const void* kernel, void (*entry)(const void*), const void* args,
                       size_t args_bytes);

// The same for a function object, whose captures are the parameters of the kernel.
template <class F>
void run_grid_of(const LaunchShape& shape, const void* kernel, const F& thread) {
  auto entry = [](const void* object) { (*static_cast<const F*>(object))(); };
  run_grid(shape, kernel, entry, &thread, sizeof thread);
}

}  // namespace simt
