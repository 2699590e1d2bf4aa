// The stack switch under the fibers; included by scheduler.cpp only.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#error "simt_switch is written for x86-64"
#endif

// Leaves the running stack, whose pointer goes to `save`, for the one at `to`. Only what a called function must
// preserve is stored; about 2 ns.
extern "C" void simt_switch(void** save, void* to);
asm(R"(
.text
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size simt_switch, . - simt_switch
)");

namespace simt {

constexpr size_t kSavedFrame = 5;  // word of a switched-off stack that holds the frame pointer of the caller

// A stack that starts in `entry` when it is switched to. `top` is 16-byte aligned; `entry` never returns.
inline void* new_stack(void* top, void (*entry)()) {
  void** words = static_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) words[i] = nullptr;
  words[6] = reinterpret_cast<void*>(entry);
  return words;
}

}  // namespace simt
