// Shadow memory: one cell per byte of shared memory and of every buffer that may be written. A cell knows the last
// write and the reads since; an access is right if both are ordered before it by barriers.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "state.h"

namespace simt {

// When and by whom a byte was touched. `epoch` counts full barriers over all blocks, so it also tells the block.
struct Stamp {
  uint32_t epoch, time, pc;  // pc: offset in the kernel's shared object
  uint16_t thread;
  bool in_flight;  // target of an asynchronous copy that has not been waited for
  bool atomic;
};

// Lanes of a warp that read at one of its times.
struct Readers {
  uint32_t time, lanes, warp;
  uint32_t next;  // index in `more_readers`, 0 at the end
};

struct Cell {
  Stamp write, read;  // the last ones
  Readers readers;    // all since the last write, in the epoch of the last read
};

namespace {

Memory dynamic_memory{{}, "dynamic shared memory", kShared, Access::scratch};
Memory static_memory{{}, "static shared memory", kShared, Access::scratch};

// Handed out from the start for every operator call, and mapped when they are touched.
constexpr size_t kMostCells = size_t{1} << 28;
Cell* all_cells = nullptr;
size_t cells_in_use = 0;

uint32_t newest_epoch;
uint32_t epoch[2];                                   // current epoch of each space
uint32_t block_epoch;                                // first one of the running block
uint32_t launch_epoch;                               // first one of the launch
std::vector<std::pair<uint32_t, int>> block_starts;  // (first epoch, block)

std::deque<Readers> more_readers;  // of cells with readers of several warps or times

// Everything about one access that the checks and the messages need.
struct Touch {
  const char* address;
  size_t bytes;
  Use use;
  const Fiber& fiber;
  void* pc;
  const Memory* memory;  // null for an address that belongs to none
};

std::string describe(const Touch& touch) {
  const char* verbs[] = {"read", "write", "atomic"};
  const std::string what = verbs[static_cast<int>(touch.use)] + (" of " + std::to_string(touch.bytes) + " bytes at ");
  if (!touch.memory) return what + "an address outside every buffer";
  const std::string offset = std::to_string(touch.address - touch.memory->begin);
  return what + "offset " + offset + " of " + touch.memory->name;
}

[[noreturn]] void report(const char* kind, const Touch& touch, const std::string& reason) {
  std::vector<void*> frames = frames_of(__builtin_frame_address(0));
  if (&touch.fiber != running || frames.empty() || touch.pc != frames[0]) frames.insert(frames.begin(), touch.pc);
  fail_at_frames(kind, describe(touch) + reason, frames);
}

// Who made the other access, and at which line unless that is not known.
std::string other_side(const char* what, const Stamp& stamp, bool has_line = true) {
  const auto next = std::upper_bound(block_starts.begin(), block_starts.end(), std::make_pair(stamp.epoch, INT32_MAX));
  const std::string who = stamp.thread == block.fibers.size()
                              ? "the copy engine"
                              : "block " + to_text(position_in(launch.shape.grid, std::prev(next)->second)) +
                                    " thread " + to_text(position_in(launch.shape.block, stamp.thread));
  const std::string where = has_line ? " at " + locate({launch.image.begin + stamp.pc}) : "";
  return std::string("\n  ") + what + where + " by " + who;
}

bool ordered(const Stamp& stamp, const Touch& touch) {
  return stamp.epoch < epoch[touch.memory->space] || stamp.thread == touch.fiber.linear ||
         touch.fiber.clock.covers(stamp.thread, stamp.time);
}

bool in_other_block(const Stamp& stamp) { return stamp.epoch >= launch_epoch && stamp.epoch < block_epoch; }

const char* race_kind(Space space) { return space == kShared ? "shared-race" : "global-race"; }

// The thread of a read in this epoch that nothing orders before the touch, or -1.
int unordered_reader(const Cell& cell, const Touch& touch) {
  if (cell.read.epoch < epoch[touch.memory->space]) return -1;
  for (const Readers* r = &cell.readers;; r = &more_readers[r->next]) {
    for (uint32_t lanes = r->lanes; lanes; lanes &= lanes - 1) {
      const uint32_t thread = r->warp * kWarpSize + __builtin_ctz(lanes);
      if (thread != touch.fiber.linear && !touch.fiber.clock.covers(thread, r->time)) return static_cast<int>(thread);
    }
    if (!r->next) return -1;
  }
}

// Adds a lane to the readers of its warp and time, and takes it from those of earlier times, which it supersedes.
void record_read(Cell& cell, const Stamp& stamp, const Touch& touch) {
  const uint32_t warp = touch.fiber.warp, lane_bit = 1u << touch.fiber.lane;
  if (cell.read.epoch != stamp.epoch) cell.readers = {};
  cell.read = stamp;
  Readers *unused = nullptr, *r = &cell.readers;
  for (;; r = &more_readers[r->next]) {
    if (r->warp == warp && r->time == stamp.time) {
      r->lanes |= lane_bit;
      return;
    }
    if (r->warp == warp) r->lanes &= ~lane_bit;
    if (!r->lanes) unused = r;
    if (!r->next) break;
  }
  if (!unused) {
    r->next = static_cast<uint32_t>(more_readers.size());
    unused = &more_readers.emplace_back();
  }
  *unused = {stamp.time, lane_bit, warp, unused->next};
}

void check_cell(Cell& cell, const Stamp& stamp, const Touch& touch) {
  const bool written_before = cell.write.epoch >= touch.memory->since;
  if (written_before && cell.write.epoch >= launch_epoch) {
    const Stamp& write = cell.write;
    const bool atomics = touch.use == Use::atomic && write.atomic;
    if (in_other_block(write) && !atomics)
      report("block-race", touch, ", which another block of the launch writes" + other_side("written", write));
    if (write.in_flight)
      report("in-flight-access", touch,
             ", into which an asynchronous copy is not finished" + other_side("copied", write));
    if (!in_other_block(write) && !ordered(write, touch) && !atomics)
      report(race_kind(touch.memory->space), touch, ", not ordered after a write" + other_side("written", write));
  }
  if (touch.use == Use::read) {
    if (!written_before && touch.memory->starts_undefined())
      report("uninitialised-read", touch, ", which nothing has written");
    record_read(cell, stamp, touch);
    return;
  }
  if (cell.read.epoch >= launch_epoch) {
    if (touch.memory->space == kGlobal && in_other_block(cell.read))
      report("block-race", touch, ", which another block of the launch reads" + other_side("read", cell.read));
    const int reader = cell.read.epoch >= block_epoch ? unordered_reader(cell, touch) : -1;
    if (reader >= 0) {
      Stamp read = cell.read;  // of the last reader, the only one whose line is kept
      read.thread = static_cast<uint16_t>(reader);
      report(race_kind(touch.memory->space), touch,
             ", not ordered after a read" + other_side("read", read, read.thread == cell.read.thread));
    }
  }
  cell.write = stamp;
  cell.read.epoch = 0;
}

void check_cells(const Touch& touch) {
  const Memory& memory = *touch.memory;
  const auto pc = static_cast<uint32_t>(static_cast<char*>(touch.pc) - launch.image.begin);
  const auto thread = static_cast<uint16_t>(touch.fiber.linear);
  const Stamp stamp{epoch[memory.space], touch.fiber.time, pc, thread, false, touch.use == Use::atomic};
  Cell* cells = &memory.cells[touch.address - memory.begin];
  const Cell before = cells[0];
  check_cell(cells[0], stamp, touch);
  // Bytes with one history have one outcome, unless they have a list of readers, which each keeps for itself.
  for (size_t i = 1; i < touch.bytes; ++i)
    if (!cells[0].readers.next && memcmp(&cells[i], &before, sizeof before) == 0)
      cells[i] = cells[0];
    else
      check_cell(cells[i], stamp, touch);
}

// Where buffers overlap, the newest counts. Dynamic shared memory is known by its capacity, not by what a launch uses.
Memory* find_memory(const char* p) {
  if (p >= shared_memory && p < shared_memory + kSharedCapacity) return &dynamic_memory;
  if (static_memory.contains(p)) return &static_memory;
  const auto found = std::find_if(buffers.rbegin(), buffers.rend(), [&](const Memory& b) { return b.contains(p); });
  return found == buffers.rend() ? nullptr : &*found;
}

// Memory that a kernel may use and that cannot race: its parameters, and constants of its shared object.
bool is_private(const char* p) {
  const char* args = static_cast<const char*>(launch.args);
  return (p >= args && p < args + launch.args_bytes) || launch.image.contains(p);
}

std::string nearest_buffer(const char* p) {
  auto distance = [&](const Memory& b) { return p < b.begin ? b.begin - p : p - b.end; };
  auto nearer = [&](const Memory& a, const Memory& b) { return distance(a) < distance(b); };
  const auto nearest = std::min_element(buffers.begin(), buffers.end(), nearer);
  if (nearest == buffers.end() || distance(*nearest) > 1 << 20) return "";
  return "; the nearest is " + nearest->name + " of " + std::to_string(nearest->size()) + " bytes, at offset " +
         std::to_string(p - nearest->begin);
}

void cover(Memory& memory, size_t bytes) {
  if (memory.cells || memory.access == Access::input) return;
  if (!all_cells) all_cells = static_cast<Cell*>(map_memory(kMostCells * sizeof(Cell)));
  if (cells_in_use + bytes > kMostCells) fail("bad-launch", "the buffers of a call take more than 256 MiB");
  memory.cells = all_cells + cells_in_use;
  cells_in_use += bytes;
}

}  // namespace

void start_checker_launch() {
  launch_epoch = newest_epoch + 1;
  block_starts.clear();
  if (!checking) return;
  const Range& fixed = launch.image.static_shared;
  if (fixed.size() != static_memory.size()) static_memory.cells = nullptr;
  static_cast<Range&>(static_memory) = fixed;
  static_cast<Range&>(dynamic_memory) = {shared_memory, shared_memory + launch.shape.shared_bytes};
  cover(static_memory, fixed.size());
  cover(dynamic_memory, kSharedCapacity);  // whatever a launch asks for
  for (Memory& buffer : buffers) cover(buffer, buffer.size());
}

void start_checker_block() {
  block_epoch = epoch[kShared] = epoch[kGlobal] = ++newest_epoch;
  dynamic_memory.since = static_memory.since = block_epoch;
  block_starts.emplace_back(block_epoch, block.linear);
  more_readers.assign(1, {});
}

void advance_epoch(Fence fence) {
  if (fence == kFenceNone) return;
  ++newest_epoch;
  if (fence & kFenceShared) epoch[kShared] = newest_epoch;
  if (fence & kFenceGlobal) epoch[kGlobal] = newest_epoch;
  if (fence == kFenceAll) more_readers.resize(1);  // no cell of an older epoch looks at its list again
}

void publish(Fiber& fiber, Clock& into) {
  into.join(fiber.clock);
  into.raise(fiber.linear, fiber.time++, block.fibers.size());
}

void check_access(const void* address, size_t bytes, Use use, const Fiber& fiber, void* pc) {
  const char* p = static_cast<const char*>(address);
  const size_t stack_offset = p - stacks.begin;
  if (stack_offset / kStackBytes == fiber.linear) return;
  const Memory* memory = find_memory(p);
  const Touch touch{p, bytes, use, fiber, pc, memory};
  if (stacks.contains(p))
    report("local-memory", touch, ", the local memory of another thread or more than a thread has");
  if (!memory) {
    if (is_private(p)) return;
    report("out-of-bounds", touch, nearest_buffer(p));
  }
  if (p + bytes > memory->end)
    report("out-of-bounds", touch, ", which has " + std::to_string(memory->size()) + " bytes");
  if ((bytes & (bytes - 1)) == 0 && (reinterpret_cast<uintptr_t>(p) & (bytes - 1)))
    report("misaligned", touch, "; the address must be a multiple of the size");
  if (use != Use::read && memory->access == Access::input) report("read-only-write", touch, ", an input");
  if (memory->cells) check_cells(touch);
  trace_access(p, bytes, use, memory->space, fiber, pc);
}

void touch_read(const void* address, size_t bytes, int lane) {
  if (!launch.shape.has_hooks) return;
  const Fiber& fiber = fiber_at(running->warp, lane);
  check_access(address, bytes, Use::read, fiber, fiber.call_pc);
}

void touch_atomic(const void* address, size_t bytes) {
  if (checking) check_access(address, bytes, Use::atomic, *running, __builtin_return_address(0));
}

void mark_async_write(const AsyncCopy& copy, uint32_t writer, uint32_t time, bool in_flight) {
  if (!checking) return;
  const Memory* memory = find_memory(copy.target);
  if (!memory || memory->space != kShared)
    fail("async-copy", "the target of an asynchronous copy is not in shared memory");
  Cell* cells = &memory->cells[copy.target - memory->begin];
  for (Cell* cell = cells; cell < cells + copy.bytes; ++cell) {
    Stamp& write = cell->write;
    write = {epoch[kShared], time, write.pc, static_cast<uint16_t>(writer), in_flight, false};
  }
}

void register_buffer(const void* begin, size_t bytes, const char* name, Access access) {
  char* from = static_cast<char*>(const_cast<void*>(begin));
  Memory buffer{{from, from + bytes}, "buffer '" + std::string(name) + "'", kGlobal, access, newest_epoch + 1};
  if (buffer.is_result()) {
    for (const Memory& known : buffers)
      if (known.begin == from && known.size() == bytes && known.access == access) return;
    start_from_snapshot(buffer);
  }
  buffers.push_back(std::move(buffer));
}

void check_outputs() {
  for (const Memory& buffer : buffers) {
    if (buffer.access != Access::output || !buffer.cells) continue;
    auto is_missing = [&](const Cell& cell) { return cell.write.epoch < buffer.since; };
    const Cell *begin = buffer.cells, *end = begin + buffer.size();
    const Cell* first = std::find_if(begin, end, is_missing);
    if (first != end)
      fail_at_frames("unwritten-output",
                     std::to_string(std::count_if(first, end, is_missing)) + " of " + std::to_string(buffer.size()) +
                         " bytes of " + buffer.name + " were not written, the first at offset " +
                         std::to_string(first - begin),
                     launch.frames);
  }
}

void clear_buffers() {
  buffers.clear();
  dynamic_memory.cells = static_memory.cells = nullptr;
  cells_in_use = 0;
  if (newest_epoch < 1u << 31) return;
  // Before the epochs run out they start again, and no cell may remember one.
  if (all_cells) madvise(all_cells, kMostCells * sizeof(Cell), MADV_DONTNEED);
  newest_epoch = 0;
}

}  // namespace simt
