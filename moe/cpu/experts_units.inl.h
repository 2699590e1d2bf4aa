// How the phases of the experts are shared out.
#pragma once

namespace rudnn::RUDNN_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(group, block) for units [begin, end), where unit u is block u / groups of group u % groups, so that every
// range holds much the same blocks of each group; all blocks of a group, which share its rows, come together.
template <class Body>
inline void for_each_unit(int64_t groups, int64_t begin, int64_t end, Body&& body) {
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = (larger(begin - group, 0) + groups - 1) / groups;
    const int64_t last = (larger(end - group, 0) + groups - 1) / groups;
    for (int64_t block = first; block < last; ++block) body(group, block);
  }
}

}  // namespace
}  // namespace rudnn::RUDNN_ISA
