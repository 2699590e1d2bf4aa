// cp.async groups, mbarriers and bulk copies. Each copy is delivered as late as a correct program can notice.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace simt {

namespace {

// The copy engine has the clock slot after the last thread.
uint32_t copy_engine() { return static_cast<uint32_t>(block.fibers.size()); }

// Looks at what a copy of the running thread touches, in units of at most 16 bytes.
void check_copied(const char* begin, int bytes, Use use, void* pc) {
  for (int i = 0; checking && i < bytes; i += 16) check_access(begin + i, std::min(bytes - i, 16), use, *running, pc);
}

// `writer` is the slot of the running thread or of the copy engine.
void issue(const AsyncCopy& copy, int unit, uint32_t writer, uint32_t time) {
  if ((reinterpret_cast<uintptr_t>(copy.target) | reinterpret_cast<uintptr_t>(copy.source) | copy.bytes) & (unit - 1))
    fail("misaligned", "asynchronous copy of %d bytes; addresses and size must be multiples of %d", copy.bytes, unit);
  check_copied(copy.target, copy.bytes, Use::write, copy.pc);
  mark_async_write(copy, writer, time, true);
  memset(copy.target, 0xff, copy.bytes);
}

void deliver(const AsyncCopy& copy, uint32_t writer, uint32_t time) {
  memcpy(copy.target, copy.source, copy.valid_bytes);
  memset(copy.target + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
  mark_async_write(copy, writer, time, false);
}

// The state of an mbarrier is guarded like any variable in shared memory: its initialisation must be ordered first.
void touch_mbarrier(void* address, Use use) {
  if (checking) check_access(address, 8, use, *running, running->call_pc);
}

MBarrier& mbarrier(void* address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("bad-barrier", "an mbarrier is used that nothing has initialised");
  touch_mbarrier(address, Use::read);
  return found->second;
}

void end_phase_if_complete(MBarrier& barrier) {
  if (barrier.arrived < barrier.count || barrier.bytes_left) return;
  barrier.phase ^= 1;
  barrier.completed = barrier.clock;
  release(barrier);  // whoever waits now waits for this phase: the one before had ended
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes, int valid_bytes) {
  Fiber& self = called_from(__builtin_return_address(0));
  self.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), bytes, valid_bytes, self.call_pc,
                         self.open_group, nullptr});
  issue(self.copies.back(), bytes, self.linear, self.time);
}

void copy_async_commit() { ++running->open_group; }

void copy_async_wait(int groups_left) {
  Fiber& self = *running;
  auto is_left = [&](const AsyncCopy& copy) { return copy.number + groups_left >= self.open_group; };
  const auto end = std::find_if(self.copies.begin(), self.copies.end(), is_left);
  for (auto copy = self.copies.begin(); copy != end; ++copy) {
    check_copied(copy->source, copy->valid_bytes, Use::read, copy->pc);
    deliver(*copy, self.linear, self.time);
  }
  self.copies.erase(self.copies.begin(), end);
}

void mbarrier_init(void* address, int count) {
  called_from(__builtin_return_address(0));
  touch_mbarrier(address, Use::write);
  MBarrier& barrier = block.mbarriers[address] = {};
  barrier.count = count;
}

void mbarrier_arrive(void* address, int announced_bytes) {
  Fiber& self = called_from(__builtin_return_address(0));
  MBarrier& barrier = mbarrier(address);
  if (barrier.arrived == barrier.count)
    fail("bad-barrier", "more than the %d arrivals that the phase of an mbarrier counts", barrier.count);
  publish(self, barrier.clock);
  barrier.bytes_left += announced_bytes;
  ++barrier.arrived;
  end_phase_if_complete(barrier);
}

void mbarrier_wait(void* address, int parity) {
  Fiber& self = called_from(__builtin_return_address(0));
  MBarrier& barrier = mbarrier(address);
  if (barrier.phase != parity) return self.clock.join(barrier.completed);
  barrier.waiting.push_back(&self);
  wait_here("mbarrier_wait");
}

void bulk_copy(void* shared, const void* global, int bytes, void* barrier) {
  Fiber& self = called_from(__builtin_return_address(0));
  const AsyncCopy copy{static_cast<char*>(shared),
                       static_cast<const char*>(global),
                       bytes,
                       bytes,
                       self.call_pc,
                       ++block.bulk_copies_issued,
                       barrier};
  mbarrier(barrier);
  check_copied(copy.source, bytes, Use::read, copy.pc);
  issue(copy, 16, copy_engine(), copy.number);
  block.bulk_copies.push_back(copy);
}

bool deliver_bulk_copy() {
  auto& copies = block.bulk_copies;
  if (copies.empty()) return false;
  size_t next = 0;
  if (order == Order::reverse) next = copies.size() - 1;
  if (order == Order::random) next = random_number() % copies.size();
  const AsyncCopy copy = copies[next];
  copies.erase(copies.begin() + next);
  deliver(copy, copy_engine(), copy.number);
  MBarrier& barrier = block.mbarriers[copy.barrier];
  barrier.bytes_left -= copy.bytes;
  barrier.clock.raise(copy_engine(), copy.number, block.fibers.size());
  end_phase_if_complete(barrier);
  return true;
}

}  // namespace simt
