// Fibers and their order, warp collectives, block barriers, and the loop over the blocks of a grid.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#include "fiber_switch.h"
#include "state.h"

extern "C" void* __tls_get_addr(void*);

namespace simt {

namespace {

void* main_stack_pointer;
size_t last_warp;

void resume(Fiber& next) {
  void** save = running ? &running->stack_pointer : &main_stack_pointer;
  running = &next;
  simt_switch(save, next.stack_pointer);
}

void to_main() {
  Fiber* self = running;
  running = nullptr;
  simt_switch(&self->stack_pointer, main_stack_pointer);
}

int pick_lane(uint32_t ready) {
  if (order == Order::forward) return __builtin_ctz(ready);
  if (order == Order::reverse) return 31 - __builtin_clz(ready);
  for (auto skip = random_number() % __builtin_popcount(ready); skip; --skip) ready &= ready - 1;
  return __builtin_ctz(ready);
}

// The next fiber of the warp that ran last, else of the first warp in order that can go on, else null.
Fiber* pick_fiber() {
  const size_t warps = block.warps.size();
  const size_t start = order == Order::random ? random_number() % warps : last_warp;
  for (size_t i = 0; i < warps; ++i) {
    const size_t warp = order == Order::reverse ? (start + warps - i) % warps : (start + i) % warps;
    if (!block.warps[warp].ready) continue;
    last_warp = warp;
    return &fiber_at(warp, pick_lane(block.warps[warp].ready));
  }
  return nullptr;
}

void fiber_main() {
  launch.entry(launch.args);
  Fiber& self = *running;
  if (!self.copies.empty())
    fail_at_frames("async-copy", "a thread returned without waiting for its cp.async", {self.copies[0].pc});
  Warp& warp = block.warps[self.warp];
  warp.ready &= ~(1u << self.lane);
  warp.alive &= ~(1u << self.lane);
  --block.alive;
  if (block.barriers[0].arrived)
    fail_at_frames("early-exit", "a thread returned while others wait in a barrier:\n" + waiting_groups(),
                   {block.barriers[0].waiting[0]->call_pc});
  for (const WarpCall& call : warp.open)
    if (call.has(self.lane))
      fail_at_frames("early-exit", "a lane returned while others wait for it:\n" + waiting_groups(),
                     {fiber_at(self.warp, __builtin_ctz(call.arrived)).call_pc});
  to_main();
  __builtin_unreachable();
}

// Whether the running thread is the last of `count` to arrive; the others go on after that one.
bool arrive(Barrier& barrier, int count, bool wait, const char* name) {
  if (wait) barrier.waiting.push_back(running);
  const bool is_last = ++barrier.arrived == count;
  if (is_last)
    release(barrier);
  else if (wait)
    wait_here(name);
  return is_last;
}

void check_shape(const LaunchShape& shape) {
  const Dim3 grid = shape.grid, size = shape.block;
  const uint64_t threads = volume(size);
  if (threads == 0 || threads > 1024 || size.z > 64)
    fail("bad-launch", "a block of (%u, %u, %u) threads; 1 to 1024 fit, at most 64 in z", size.x, size.y, size.z);
  if (grid.x - 1 > 0x7ffffffeu || grid.y - 1 > 65534 || grid.z - 1 > 65534)  // 0 wraps around
    fail("bad-launch", "a grid of (%u, %u, %u) blocks; 1 to (2^31 - 1, 65535, 65535)", grid.x, grid.y, grid.z);
  if (shape.shared_bytes > std::min(shape.shared_limit, kSharedCapacity))
    fail("bad-launch", "%zu bytes of dynamic shared memory, the limit is %zu", shape.shared_bytes, shape.shared_limit);
}

void prepare_memory(size_t threads) {
  if (stacks.size() < threads * kStackBytes) {
    if (stacks.begin) munmap(stacks.begin, stacks.size());
    stacks.begin = static_cast<char*>(map_memory(threads * kStackBytes));
    stacks.end = stacks.begin + threads * kStackBytes;
  }
  if (!shared_memory) shared_memory = static_cast<char*>(aligned_alloc(1024, kSharedCapacity));
}

void start_block(uint64_t linear) {
  const Dim3 grid = launch.shape.grid, size = launch.shape.block;
  const size_t threads = volume(size);
  block = {};
  block.linear = static_cast<int>(linear);
  block.index = position_in(grid, linear);
  block.alive = static_cast<int>(threads);
  block.fibers.resize(threads);
  block.warps.assign((threads + kWarpSize - 1) / kWarpSize, {});
  for (size_t i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.index = position_in(size, i);
    fiber.linear = static_cast<uint32_t>(i);
    fiber.lane = fiber.linear % kWarpSize;
    fiber.warp = fiber.linear / kWarpSize;
    // Stacks that start at different offsets do not all compete for the same cache lines.
    char* top = stacks.begin + (i + 1) * kStackBytes - fiber.lane * 320;
    fiber.stack_pointer = new_stack(top, fiber_main);
    block.warps[fiber.warp].alive |= 1u << fiber.lane;
    make_ready(fiber);
  }
  // Shared memory starts as NaN, so that a kernel that relies on zeros is wrong in every order.
  memset(shared_memory, 0xff, launch.shape.shared_bytes);
  const Range& fixed = launch.image.static_shared;
  if (fixed.begin) memset(fixed.begin, 0xff, fixed.size());
  last_warp = order == Order::reverse ? block.warps.size() - 1 : 0;
  start_checker_block();
}

void run_block(uint64_t linear) {
  start_block(linear);
  while (block.alive) {
    Fiber* next = pick_fiber();
    if (next) {
      resume(*next);
      throw_pending_error();
    } else if (!deliver_bulk_copy()) {
      for (Fiber& fiber : block.fibers)
        if (is_alive(fiber))
          fail_at_frames("deadlock", "no thread can go on:\n" + waiting_groups(),
                         frames_of(static_cast<void**>(fiber.stack_pointer)[kSavedFrame]));
    }
  }
  if (!block.bulk_copies.empty())
    fail_at_frames("async-copy", "the block ended before a bulk copy that nothing waited for",
                   {block.bulk_copies[0].pc});
}

}  // namespace

Image find_image(const void* code) {
  Image image{{static_cast<char*>(const_cast<void*>(code))}, {}};
  auto visit = [](dl_phdr_info* info, size_t, void* state) {
    Image& image = *static_cast<Image*>(state);
    char* base = reinterpret_cast<char*>(info->dlpi_addr);
    Range memory{base, base};
    size_t shared_bytes = 0;
    for (const auto* header = info->dlpi_phdr; header < info->dlpi_phdr + info->dlpi_phnum; ++header) {
      if (header->p_type == PT_LOAD) memory.end = std::max(memory.end, base + header->p_vaddr + header->p_memsz);
      if (header->p_type == PT_TLS) shared_bytes = header->p_memsz;
    }
    if (!memory.contains(image.begin)) return 0;
    image = {memory, {}};
    if (shared_bytes) {
      unsigned long index[2] = {info->dlpi_tls_modid, 0};  // tls_index: module, offset
      image.static_shared.begin = static_cast<char*>(__tls_get_addr(index));
      image.static_shared.end = image.static_shared.begin + shared_bytes;
    }
    return 1;
  };
  dl_iterate_phdr(visit, &image);
  return image;
}

void* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void abandon_block() {
  if (running) to_main();
  throw_pending_error();
  __builtin_unreachable();
}

void wait_here(const char* name) {
  Fiber& self = *running;
  self.waits_in = name;
  Warp& warp = block.warps[self.warp];
  warp.ready &= ~(1u << self.lane);
  // Going straight to the next lane of the same warp halves the switches.
  if (warp.ready && order != Order::random)
    resume(fiber_at(self.warp, pick_lane(warp.ready)));
  else
    to_main();
}

void make_ready(const Fiber& fiber) { block.warps[fiber.warp].ready |= 1u << fiber.lane; }

void release(Barrier& barrier) {
  for (Fiber* fiber : barrier.waiting) {
    fiber->clock.join(barrier.clock);
    make_ready(*fiber);
  }
  barrier.arrived = 0;
  barrier.clock.seen.clear();
  barrier.waiting.clear();
}

void warp_collective(uint32_t mask, const void* in, void* out, Combine combine, const char* name, Site site) {
  Fiber& self = called_from(__builtin_return_address(0));
  Warp& warp = block.warps[self.warp];
  if (!(mask >> self.lane & 1)) fail("divergent-warp", "%s: mask %08x lacks the calling lane", name, mask);
  if (mask & ~warp.alive)
    fail("divergent-warp", "%s: mask %08x names lanes that returned or do not exist; alive are %08x", name, mask,
         warp.alive);
  auto call = std::find_if(warp.open.begin(), warp.open.end(), [&](const WarpCall& c) { return c.mask & mask; });
  if (call == warp.open.end()) {
    warp.open.push_back({mask, 0, combine, name, site, {}, {}});
    call = warp.open.end() - 1;
  } else if (call->mask != mask || call->combine != combine || call->site != site) {
    fail("divergent-warp", "%s with mask %08x, while lanes of mask %08x wait elsewhere:\n%s", name, mask, call->mask,
         waiting_groups().c_str());
  }
  call->inputs[self.lane] = in;
  call->outputs[self.lane] = out;
  call->arrived |= 1u << self.lane;
  if (call->arrived != mask) return wait_here(name);
  if (combine) {
    Unchecked emulated;
    combine(*call);
  }
  call->for_each_lane([&](int lane) { make_ready(fiber_at(self.warp, lane)); });
  warp.open.erase(call);
  if (order == Order::random) to_main();
}

void warp_barrier(uint32_t mask, const char* name, Site site) {
  warp_collective(
      mask, nullptr, nullptr,
      [](const WarpCall& call) {
        Clock all;
        call.for_each_lane([&](int lane) { publish(fiber_at(running->warp, lane), all); });
        call.for_each_lane([&](int lane) { fiber_at(running->warp, lane).clock = all; });
      },
      name, site);
  running->call_pc = __builtin_return_address(0);
}

void block_barrier(Fence fence, const char* name, Site site) {
  called_from(__builtin_return_address(0));
  Barrier& barrier = block.barriers[0];
  const int threads = static_cast<int>(block.fibers.size());
  if (block.alive < threads)
    fail("early-exit", "%s after %d of %d threads have returned", name, threads - block.alive, threads);
  if (barrier.arrived == 0) {
    barrier.site = site;
  } else if (barrier.site != site) {
    fail("divergent-barrier", "%s, while other threads wait in another barrier:\n%s", name, waiting_groups().c_str());
  }
  if (!arrive(barrier, threads, true, name)) return;
  advance_epoch(fence);
  if (order == Order::random) to_main();
}

void named_barrier(int id, int count, bool wait, const char* name) {
  Fiber& self = called_from(__builtin_return_address(0));
  const int threads = static_cast<int>(block.fibers.size());
  if (id < 1 || id > 15 || count <= 0 || count > threads || count % kWarpSize)
    fail("bad-barrier", "%s: barrier %d for %d threads; 1 to 15, and a multiple of %d up to %d", name, id, count,
         kWarpSize, threads);
  publish(self, block.barriers[id].clock);
  arrive(block.barriers[id], count, wait, name);
}

void run_grid(const LaunchShape& shape, const void* kernel, void (*entry)(const void*), const void* args,
              size_t args_bytes) {
  if (running) fail("bad-launch", "a kernel cannot launch a kernel");
  launch = {shape, kernel, entry, args, args_bytes, find_image(kernel), {}};
  launch.frames = frames_of(__builtin_frame_address(0));
  check_shape(shape);
  prepare_memory(volume(shape.block));
  order = current_order();
  checking = shape.has_hooks;
  random_number.seed();
  start_checker_launch();
  std::vector<uint32_t> sequence(volume(shape.grid));
  std::iota(sequence.begin(), sequence.end(), 0u);
  if (order == Order::reverse) std::reverse(sequence.begin(), sequence.end());
  if (order == Order::random) std::shuffle(sequence.begin(), sequence.end(), random_number);
  for (uint32_t linear : sequence) run_block(linear);
}

Dim3 thread_index() { return running->index; }
Dim3 block_index() { return block.index; }
Dim3 block_size() { return launch.shape.block; }
Dim3 grid_size() { return launch.shape.grid; }
uint32_t linear_thread() { return running->linear; }
uint32_t lane() { return running->lane; }
uint32_t warp() { return running->warp; }
uint32_t warps_per_block() { return static_cast<uint32_t>(block.warps.size()); }
unsigned char* dynamic_shared() { return reinterpret_cast<unsigned char*>(shared_memory); }
uint32_t live_lanes() { return block.warps[running->warp].alive; }

Unchecked::Unchecked() : before_(checking) { checking = false; }
Unchecked::~Unchecked() { checking = before_; }

}  // namespace simt
