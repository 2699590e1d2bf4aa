// Source lines of instruction addresses, and the error of a launch.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "state.h"

namespace simt {

namespace {

std::unique_ptr<Error> pending;

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Files whose lines say how an operation is emulated, not which line of the kernel is wrong.
bool is_internal(const std::string& path) {
  for (const char* part : {"/simt/engine/", "/simt/cuda/", "/simt/metal/", "common/cuda/device.cuh", "/usr/"})
    if (path.find(part) != std::string::npos) return true;
  return path.empty() || path[0] == '?';
}

struct Line {
  std::string file, function;
  int line;
};

// The inlined calls at an instruction, innermost first, as addr2line knows them.
const std::vector<Line>& lines_at(void* return_address) {
  static std::map<void*, std::vector<Line>> known;
  const auto found = known.find(return_address);
  if (found != known.end()) return found->second;
  std::vector<Line>& lines = known[return_address];
  Dl_info module;
  if (!dladdr(return_address, &module)) return lines;
  const uintptr_t offset = static_cast<char*>(return_address) - static_cast<char*>(module.dli_fbase);
  char command[4400];
  snprintf(command, sizeof command, "addr2line -f -C -i -e '%s' 0x%zx 2>/dev/null", module.dli_fname, offset - 1);
  FILE* pipe = popen(command, "r");
  char function[2048], position[2048];
  while (pipe && fgets(function, sizeof function, pipe) && fgets(position, sizeof position, pipe)) {
    function[strcspn(function, "\n")] = 0;
    char* colon = strrchr(position, ':');
    if (!colon || position[0] == '?') continue;
    *colon = 0;
    lines.push_back({position, function, atoi(colon + 1)});
  }
  if (pipe) pclose(pipe);
  if (lines.empty()) {
    char text[64];
    snprintf(text, sizeof text, "+0x%zx", offset);
    lines.push_back({module.dli_fname + std::string(text), "", 0});
  }
  return lines;
}

// "0-31, 64" from a sorted list.
std::string ranges(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (size_t i = 0, last = 0; i < numbers.size(); i = ++last) {
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (i ? ", " : "") + std::to_string(numbers[i]) + (last > i ? "-" + std::to_string(numbers[last]) : "");
  }
  return text;
}

}  // namespace

// Return addresses up the stack, of the kernel and of the engine, as far as the frame pointers can be trusted.
std::vector<void*> frames_of(void* frame_pointer) {
  static const Range engine = find_image(reinterpret_cast<void*>(&frames_of)).memory;
  std::vector<void*> frames;
  for (void** frame = static_cast<void**>(frame_pointer); frame && frames.size() < 16;) {
    void* return_address = frame[1];
    if (launch.image.contains(return_address))
      frames.push_back(return_address);
    else if (!engine.contains(return_address))
      break;
    void** caller = static_cast<void**>(*frame);
    if (caller <= frame) break;
    frame = caller;
  }
  return frames;
}

std::string locate(const std::vector<void*>& frames) {
  std::vector<Line> all, shown;
  for (void* frame : frames)
    for (const Line& line : lines_at(frame)) all.push_back(line);
  std::copy_if(all.begin(), all.end(), std::back_inserter(shown), [](const Line& l) { return !is_internal(l.file); });
  if (shown.empty()) shown.swap(all);  // better a line of the emulation than none
  if (shown.empty()) return "an unknown line";
  std::string text, last;
  for (size_t i = 0; i < std::min<size_t>(shown.size(), 4); ++i) {
    const std::string place = base_name(shown[i].file) + ":" + std::to_string(shown[i].line);
    if (place != last) text += (i ? " < " : "") + place;
    last = place;
  }
  return text;
}

bool has_error() { return pending != nullptr; }

void throw_error() {
  const Error error = *pending;
  pending.reset();
  throw error;
}

void fail_at_frames(const char* kind, const std::string& text, const std::vector<void*>& frames) {
  checking = false;
  // An address inside the kernel, because lines_at looks at the byte before the one it is given.
  const auto& kernel = lines_at(static_cast<char*>(const_cast<void*>(launch.kernel)) + 1);
  std::string message = kind + (" at " + locate(frames)) + ": " + text;
  if (!kernel.empty()) message += "\n  in " + kernel.back().function;
  if (running) message += ", block " + to_text(block.index) + ", thread " + to_text(running->index);
  pending = std::make_unique<Error>(message);
  abandon_block();
}

void fail(const char* kind, const char* format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fail_at_frames(kind, text, frames_of(__builtin_frame_address(0)));
}

// One line per place where threads of the block wait, and one for those that returned.
std::string waiting_groups() {
  struct Group {
    const char* name;
    std::vector<uint32_t> threads;
  };
  std::map<void*, Group> groups;
  std::vector<uint32_t> returned;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.state == State::done) returned.push_back(fiber.linear);
    if (fiber.state != State::waiting) continue;
    Group& group = groups[fiber.call_pc];
    group.name = fiber.waits_in;
    group.threads.push_back(fiber.linear);
  }
  std::string text;
  for (const auto& [pc, group] : groups)
    text += "  threads " + ranges(group.threads) + " wait in " + group.name + " at " + locate({pc}) + "\n";
  if (!returned.empty()) text += "  threads " + ranges(returned) + " have returned\n";
  if (!text.empty()) text.pop_back();
  return text;
}

}  // namespace simt
