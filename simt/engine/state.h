// What the parts of the engine share. One block runs at a time, on the operating-system thread that launched it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "host.h"
#include "simt.h"

namespace simt {

inline uint64_t volume(Dim3 box) { return uint64_t{box.x} * box.y * box.z; }
// The position of a linear index in a box, x fastest.
inline Dim3 position_in(Dim3 box, uint64_t linear) {
  return {static_cast<uint32_t>(linear % box.x), static_cast<uint32_t>(linear / box.x % box.y),
          static_cast<uint32_t>(linear / box.x / box.y)};
}
inline std::string to_text(Dim3 d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

// For every thread, the latest of its times that is ordered before the owner of the clock. One slot after the last
// thread belongs to the copy engine.
struct Clock {
  std::vector<uint32_t> seen;

  void join(const Clock& other) {
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size());
    for (size_t i = 0; i < other.seen.size(); ++i)
      if (seen[i] < other.seen[i]) seen[i] = other.seen[i];
  }
  void raise(uint32_t thread, uint32_t time, size_t threads) {
    if (seen.size() <= threads) seen.resize(threads + 1);
    if (seen[thread] < time) seen[thread] = time;
  }
  bool covers(uint32_t thread, uint32_t time) const { return thread < seen.size() && seen[thread] >= time; }
};

struct AsyncCopy {
  char* target;
  const char* source;
  int bytes, valid_bytes;
  void* pc;
  uint32_t number;  // of its group, or of the bulk copy
  void* barrier;    // of a bulk copy
};

struct Fiber {
  void* stack_pointer;  // while not running
  Dim3 index;
  uint32_t linear, lane, warp;
  const char* waits_in;  // name of the operation, while waiting
  void* call_pc;         // kernel instruction that called the engine last
  uint32_t time = 1;     // raised whenever the thread publishes what it did
  Clock clock;
  std::vector<AsyncCopy> copies;  // cp.async that is not finished, in order
  uint32_t open_group = 0;
};

struct Warp {
  uint32_t ready, alive;  // lane masks
  std::vector<WarpCall> open;
};

struct Barrier {
  int arrived = 0;
  Site site{};  // of a block barrier
  Clock clock;  // of those that arrived, unless the barrier is a block's, which starts an epoch
  std::vector<Fiber*> waiting;
};

struct MBarrier : Barrier {
  int count = 0, phase = 0;
  long bytes_left = 0;
  Clock completed;  // of the last phase that ended
};

struct Range {
  char *begin = nullptr, *end = nullptr;
  bool contains(const void* p) const { return p >= begin && p < end; }
  size_t size() const { return end - begin; }
};

// A loaded shared object, and its thread-local segment.
struct Image : Range {
  Range static_shared;
};

enum Space { kShared, kGlobal };
enum class Use : uint8_t { read, write, atomic };  // of an address

struct Cell;  // of shadow memory, see checker.cpp

// The shared memory of a block, static or dynamic, or a registered buffer.
struct Memory : Range {
  std::string name;
  Space space;
  Access access;
  uint32_t since = 0;     // the first epoch in which this range was this memory
  Cell* cells = nullptr;  // from the first checked launch on; none for inputs. They may hold older epochs.

  bool is_result() const { return access == Access::output || access == Access::update; }
  bool starts_undefined() const { return access == Access::output || access == Access::scratch; }
};

struct Launch {
  LaunchShape shape{};
  const void* kernel = nullptr;
  void (*entry)(const void*) = nullptr;
  const void* args = nullptr;
  size_t args_bytes = 0;
  Image image;                // the shared object that holds the kernel
  std::vector<void*> frames;  // of the host code that launched
};

struct Block {
  Dim3 index{};
  int linear = 0;
  int alive = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::unordered_map<void*, MBarrier> mbarriers;
  std::vector<AsyncCopy> bulk_copies;  // in flight
  uint32_t bulk_copies_issued = 0;     // the time of the copy engine
};

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kSharedCapacity = 256 << 10;

inline Order order = Order::forward;  // of the launches under way
inline Launch launch;
inline Block block;
// Null outside a kernel, and on a thread that does not run one: launchers are instrumented too. Initial-exec, because
// each hook reads it.
inline __constinit thread_local Fiber* running __attribute__((tls_model("initial-exec"))) = nullptr;
inline bool checking = false;  // accesses are looked at; only in kernels compiled with hooks
inline Range stacks;
inline char* shared_memory = nullptr;
inline std::vector<Memory> buffers;
inline std::minstd_rand random_number;

inline Fiber& fiber_at(size_t warp, int lane) { return block.fibers[warp * kWarpSize + lane]; }
inline bool is_alive(const Fiber& fiber) { return block.warps[fiber.warp].alive >> fiber.lane & 1; }
// The running fiber, which calls the engine from the instruction before `pc`.
inline Fiber& called_from(void* pc) {
  running->call_pc = pc;
  return *running;
}

// scheduler.cpp
void wait_here(const char* name);  // parks the running fiber until make_ready
void make_ready(const Fiber& fiber);
void release(Barrier& barrier);  // ends a phase: those that wait go on, after all that arrived
void* map_memory(size_t bytes);  // zeros, taken page by page when they are touched
Image find_image(const void* code);
[[noreturn]] void abandon_block();  // the launch ends with the pending error; what fibers own is leaked

// async.cpp
bool deliver_bulk_copy();  // one copy in flight, if any

// checker.cpp
void start_checker_launch();
void start_checker_block();
void advance_epoch(Fence fence);
void check_access(const void* address, size_t bytes, Use use, const Fiber& fiber, void* pc);
void mark_async_write(const AsyncCopy& copy, uint32_t writer, uint32_t time, bool in_flight);
void publish(Fiber& fiber, Clock& into);  // release: what the fiber did so far becomes part of `into`

// orders.cpp
Order current_order();
void start_from_snapshot(const Memory& result);

// trace.cpp
void trace_access(const void* address, size_t bytes, Use use, Space space, const Fiber& fiber, void* pc);

// report.cpp
void load_lines(const std::vector<void*>& addresses);  // of the last launch, all at once for many calls of locate
// The innermost kernel line as "file:line", and after " < " the lines that called it.
std::string locate(const std::vector<void*>& frames);
std::vector<void*> frames_of(void* frame_pointer);
void throw_pending_error();
[[noreturn]] void fail_at_frames(const char* kind, const std::string& text, const std::vector<void*>& frames);
std::string waiting_groups();

}  // namespace simt
