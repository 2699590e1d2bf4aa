// Source lines of instruction addresses, and the error of a launch.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <utility>

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

// The inlined calls at the instruction before a return address, innermost first.
std::map<void*, std::vector<Line>> known_lines;

std::string next_line(FILE* pipe) {
  std::string line;
  for (int c = fgetc(pipe); c != EOF && c != '\n'; c = fgetc(pipe)) line += static_cast<char>(c);
  return line;
}

// One run of addr2line, which costs more than its answers.
void ask_addr2line(const std::string& module, const std::vector<std::pair<void*, uintptr_t>>& offsets) {
  std::stringstream command;
  command << "addr2line -a -f -C -i -e '" << module << "'" << std::hex;
  for (const auto& [address, offset] : offsets) command << " 0x" << offset - 1;
  FILE* pipe = popen((command.str() + " 2>/dev/null").c_str(), "r");
  if (!pipe) return;
  auto next = offsets.begin();
  std::vector<Line>* lines = nullptr;
  for (std::string head = next_line(pipe); !head.empty(); head = next_line(pipe)) {
    if (head.compare(0, 2, "0x") == 0) {  // the address that is asked for; its functions and positions follow
      lines = &known_lines[(next++)->first];
      continue;
    }
    const std::string position = next_line(pipe);
    const size_t colon = position.rfind(':');
    if (position[0] != '?' && colon != std::string::npos)
      lines->push_back({position.substr(0, colon), head, atoi(position.c_str() + colon + 1)});
  }
  pclose(pipe);
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

void load_lines(const std::vector<void*>& addresses) {
  constexpr size_t kMost = 1000;  // a command line has room for so many
  std::map<std::string, std::vector<std::pair<void*, uintptr_t>>> unknown;
  for (void* address : addresses) {
    Dl_info module;
    if (known_lines.count(address) || !dladdr(address, &module)) continue;
    known_lines[address];
    auto& offsets = unknown[module.dli_fname];
    offsets.emplace_back(address, static_cast<char*>(address) - static_cast<char*>(module.dli_fbase));
    if (offsets.size() == kMost) ask_addr2line(module.dli_fname, std::exchange(offsets, {}));
  }
  for (const auto& [module, offsets] : unknown)
    if (!offsets.empty()) ask_addr2line(module, offsets);
}

// Return addresses up the stack, of the kernel and of the engine, as far as the frame pointers can be trusted.
std::vector<void*> frames_of(void* frame_pointer) {
  static const Range engine = find_image(reinterpret_cast<void*>(&frames_of));
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
  load_lines(frames);
  for (void* frame : frames) all.insert(all.end(), known_lines[frame].begin(), known_lines[frame].end());
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
  // An address inside the kernel, because the byte before it is looked at.
  void* entry = static_cast<char*>(const_cast<void*>(launch.kernel)) + 1;
  load_lines({entry});
  const auto& kernel = known_lines[entry];
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
