// Accesses of one warp, recorded for performance tables; devtools/transactions.py reads them through these C functions.
#include "state.h"

namespace simt {

namespace {

struct Record {
  uint64_t pc, address;
  uint32_t bytes, lane;
  uint32_t kind;  // global load, global store, shared load, shared store
  uint32_t padding;
};

int traced_block = -1, traced_warp = -1;  // counted linearly
std::vector<Record> records;

}  // namespace

void trace_access(const void* address, size_t bytes, Use use, Space space, const Fiber& fiber, void* pc) {
  if (block.linear != traced_block || static_cast<int>(fiber.warp) != traced_warp) return;
  records.push_back({reinterpret_cast<uint64_t>(pc), reinterpret_cast<uint64_t>(address), static_cast<uint32_t>(bytes),
                     fiber.lane, (space == kShared ? 2u : 0u) + (use != Use::read), 0});
}

}  // namespace simt

extern "C" {
SIMT_API void simt_start_trace(int64_t block, int64_t warp) {
  simt::traced_block = static_cast<int>(block);
  simt::traced_warp = static_cast<int>(warp);
  simt::records.clear();
}
// The records stay until the next start.
SIMT_API int64_t simt_stop_trace(const void** records) {
  simt::traced_block = simt::traced_warp = -1;
  std::vector<void*> instructions;
  for (const simt::Record& record : simt::records) instructions.push_back(reinterpret_cast<void*>(record.pc));
  simt::load_lines(instructions);
  *records = simt::records.data();
  return static_cast<int64_t>(simt::records.size());
}
// "file:line" of a pc, until the next call.
SIMT_API const char* simt_line_of(uint64_t pc) {
  static std::string line;
  line = simt::locate({reinterpret_cast<void*>(pc)});
  return line.c_str();
}
}
