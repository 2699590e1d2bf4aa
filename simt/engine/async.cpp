// cp.async groups, mbarriers and bulk copies. Each copy is delivered as late as a correct program can notice.
#include <cstring>
#include <unordered_map>

#include "state.h"

namespace simt {

namespace {

struct MBarrier {
  int count, arrivals_left, phase;
  long bytes_left;
  Clock arriving;   // of the running phase
  Clock completed;  // of the last one that ended
  std::vector<Fiber*> waiting;
};

struct BulkCopy {
  char* target;
  const char* source;
  int bytes;
  void *barrier, *pc;
  uint32_t time;
};

std::unordered_map<void*, MBarrier> mbarriers;
std::vector<BulkCopy> bulk_copies;
uint32_t copy_engine_time;

// The copy engine has the clock slot after the last thread.
uint32_t copy_engine() { return static_cast<uint32_t>(block.fibers.size()); }

MBarrier& mbarrier(void* address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("bad-barrier", "an mbarrier is used that nothing has initialised");
  return found->second;
}

void end_phase_if_complete(MBarrier& barrier) {
  if (barrier.arrivals_left || barrier.bytes_left) return;
  barrier.phase ^= 1;
  barrier.arrivals_left = barrier.count;
  barrier.completed = std::move(barrier.arriving);
  barrier.arriving.seen.clear();
  // Whoever waits now waits for this phase: the one before had ended.
  for (Fiber* fiber : barrier.waiting) {
    fiber->clock.join(barrier.completed);
    make_ready(*fiber);
  }
  barrier.waiting.clear();
}

// The state of an mbarrier is guarded like any variable in shared memory: its initialisation must be ordered first.
void touch_mbarrier(void* barrier, bool write) {
  if (checking) check_access(barrier, 8, write, *running, running->call_pc);
}

void deliver(const AsyncCopy& copy) {
  Fiber& self = *running;
  if (checking && copy.valid_bytes) check_access(copy.source, copy.valid_bytes, false, self, copy.pc);
  memcpy(copy.target, copy.source, copy.valid_bytes);
  memset(copy.target + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
  deliver_async_write(copy.target, copy.bytes, self.time);
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes, int valid_bytes) {
  Fiber& self = called_from(__builtin_return_address(0));
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) & (bytes - 1))
    fail("misaligned", "cp.async of %d bytes; both addresses must be multiples of the size", bytes);
  char* target = static_cast<char*>(shared);
  issue_async_write(target, bytes, self, self.linear, self.time, self.call_pc);
  memset(target, 0xff, bytes);
  self.open_group.push_back({target, static_cast<const char*>(global), bytes, valid_bytes, self.call_pc});
}

void copy_async_commit() {
  running->groups.push_back(std::move(running->open_group));
  running->open_group.clear();
}

void copy_async_wait(int groups_left) {
  auto& groups = running->groups;
  while (groups.size() > static_cast<size_t>(groups_left)) {
    for (const AsyncCopy& copy : groups.front()) deliver(copy);
    groups.erase(groups.begin());
  }
}

void finish_async_thread(const Fiber& fiber) {
  const std::vector<AsyncCopy>* group = &fiber.open_group;
  for (const auto& other : fiber.groups)
    if (!other.empty()) group = &other;
  if (!group->empty())
    fail_at_frames("async-copy", "a thread returned without waiting for its cp.async", {group->front().pc});
}

void mbarrier_init(void* address, int count) {
  running->call_pc = __builtin_return_address(0);
  touch_mbarrier(address, true);
  mbarriers[address] = {count, count, 0, 0, {}, {}, {}};
}

void mbarrier_arrive(void* address, int announced_bytes) {
  Fiber& self = called_from(__builtin_return_address(0));
  MBarrier& barrier = mbarrier(address);
  touch_mbarrier(address, false);
  if (barrier.arrivals_left == 0)
    fail("bad-barrier", "more than the %d arrivals that the phase of an mbarrier counts", barrier.count);
  publish(self, barrier.arriving);
  barrier.bytes_left += announced_bytes;
  --barrier.arrivals_left;
  end_phase_if_complete(barrier);
}

void mbarrier_wait(void* address, int parity) {
  Fiber& self = called_from(__builtin_return_address(0));
  MBarrier& barrier = mbarrier(address);
  touch_mbarrier(address, false);
  if (barrier.phase != parity) return self.clock.join(barrier.completed);
  barrier.waiting.push_back(&self);
  wait_here("mbarrier_wait");
}

void bulk_copy(void* shared, const void* global, int bytes, void* barrier) {
  Fiber& self = called_from(__builtin_return_address(0));
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) & 15)
    fail("misaligned", "bulk copy of %d bytes; addresses and size must be multiples of 16", bytes);
  mbarrier(barrier);
  touch_mbarrier(barrier, false);
  char* target = static_cast<char*>(shared);
  const char* source = static_cast<const char*>(global);
  if (checking)
    for (int i = 0; i < bytes; i += 16) check_access(source + i, 16, false, self, self.call_pc);
  ++copy_engine_time;
  for (int i = 0; i < bytes; i += 16)
    issue_async_write(target + i, 16, self, copy_engine(), copy_engine_time, self.call_pc);
  memset(target, 0xff, bytes);
  bulk_copies.push_back({target, source, bytes, barrier, self.call_pc, copy_engine_time});
}

void start_async_block() {
  mbarriers.clear();
  bulk_copies.clear();
  copy_engine_time = 0;
}

bool deliver_bulk_copy() {
  if (bulk_copies.empty()) return false;
  size_t next = 0;
  if (order == Order::reverse) next = bulk_copies.size() - 1;
  if (order == Order::random) next = random_number() % bulk_copies.size();
  const BulkCopy copy = bulk_copies[next];
  bulk_copies.erase(bulk_copies.begin() + next);
  memcpy(copy.target, copy.source, copy.bytes);
  deliver_async_write(copy.target, copy.bytes, copy.time);
  MBarrier& barrier = mbarriers[copy.barrier];
  barrier.bytes_left -= copy.bytes;
  barrier.arriving.raise(copy_engine(), copy.time, block.fibers.size());
  end_phase_if_complete(barrier);
  return true;
}

void finish_async_block() {
  if (!bulk_copies.empty())
    fail_at_frames("async-copy", "the block ended before a bulk copy that nothing waited for", {bulk_copies[0].pc});
}

}  // namespace simt
