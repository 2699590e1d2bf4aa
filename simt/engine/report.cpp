// Source lines of instruction addresses, and the error of a launch.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <ext/stdio_filebuf.h>
#include <map>
#include <memory>
#include <sstream>
#include <utility>

#include "state.h"

namespace simt {

namespace {

std::unique_ptr<Error> pending;

// Files whose lines say how an operation is emulated, not which line of the kernel is wrong.
bool is_internal(const std::string& path) {
  const char* parts[] = {"/simt/engine/", "/simt/cuda/", "/simt/metal/", "common/cuda/device.cuh", "/usr/"};
  return std::any_of(std::begin(parts), std::end(parts), [&](const char* p) { return path.find(p) != path.npos; });
}

struct Line {
  std::string place;  // "file:line"
  std::string function;
  bool internal;
};

// The inlined calls at the instruction before a return address, innermost first.
std::map<void*, std::vector<Line>> known_lines;

// One run of addr2line, which costs more than its answers.
void ask_addr2line(const std::string& module, const std::vector<void*>& addresses) {
  std::stringstream command;
  command << "addr2line -a -f -C -i -e '" << module << "'" << std::hex;
  for (void* address : addresses) command << " 0x" << static_cast<char*>(address) - launch.image.begin - 1;
  FILE* pipe = popen((command.str() + " 2>/dev/null").c_str(), "r");
  if (!pipe) return;
  __gnu_cxx::stdio_filebuf<char> buffer(pipe, std::ios::in);
  std::istream answers(&buffer);
  auto next = addresses.begin();
  std::vector<Line>* lines = nullptr;
  for (std::string head, position; std::getline(answers, head);) {
    if (head.compare(0, 2, "0x") == 0) {  // the address that is asked for; its functions and positions follow
      lines = &known_lines[*next++];
      continue;
    }
    std::getline(answers, position);
    const size_t colon = position.rfind(':');
    if (position[0] == '?' || colon == std::string::npos) continue;
    const std::string file = position.substr(0, colon), number = std::to_string(atoi(&position[colon + 1]));
    lines->push_back({file.substr(file.rfind('/') + 1) + ":" + number, head, is_internal(file)});
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
  Dl_info module;
  if (!dladdr(launch.kernel, &module)) return;
  std::vector<void*> asked;
  for (void* address : addresses) {
    if (known_lines.try_emplace(address).second) asked.push_back(address);
    if (asked.size() == kMost) ask_addr2line(module.dli_fname, std::exchange(asked, {}));
  }
  if (!asked.empty()) ask_addr2line(module.dli_fname, asked);
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
  load_lines(frames);
  std::vector<std::string> all, shown;
  for (void* frame : frames) {
    for (const Line& line : known_lines[frame]) {
      all.push_back(line.place);
      if (!line.internal) shown.push_back(line.place);
    }
  }
  if (shown.empty()) shown.swap(all);  // better a line of the emulation than none
  if (shown.empty()) return "an unknown line";
  const auto end = std::unique(shown.begin(), shown.end());
  std::string text = shown[0];
  for (auto place = shown.begin() + 1; place < std::min(end, shown.begin() + 4); ++place) text += " < " + *place;
  return text;
}

void throw_pending_error() {
  if (pending) throw Error(*std::exchange(pending, nullptr));
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
  std::map<void*, std::vector<uint32_t>> waiting;
  std::vector<uint32_t> returned;
  for (const Fiber& fiber : block.fibers) {
    if (!is_alive(fiber))
      returned.push_back(fiber.linear);
    else if (!(block.warps[fiber.warp].ready >> fiber.lane & 1))
      waiting[fiber.call_pc].push_back(fiber.linear);
  }
  std::string text;
  for (const auto& [pc, threads] : waiting)
    text +=
        "  threads " + ranges(threads) + " wait in " + block.fibers[threads[0]].waits_in + " at " + locate({pc}) + "\n";
  if (!returned.empty()) text += "  threads " + ranges(returned) + " have returned\n";
  if (!text.empty()) text.pop_back();
  return text;
}

}  // namespace simt
