// How the phases of the experts are shared out.
#pragma once

namespace rudnn::RUDNN_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct UnitRange {
  int64_t first;
  int64_t last;
};

// The blocks of a group's weights among units [begin, end), where unit u is block u / groups of group u % groups.
inline UnitRange units_of_group(int64_t group, int64_t groups, int64_t begin, int64_t end) {
  return {(larger(begin - group, 0) + groups - 1) / groups, (larger(end - group, 0) + groups - 1) / groups};
}

// Calls body(group, block) for units [begin, end), of which every range holds much the same blocks of each group; all
// blocks of a group, which share its rows, come together.
template <class Body>
inline void for_each_unit(int64_t groups, int64_t begin, int64_t end, Body&& body) {
  for (int64_t group = 0; group < groups; ++group) {
    const UnitRange blocks = units_of_group(group, groups, begin, end);
    for (int64_t block = blocks.first; block < blocks.last; ++block) body(group, block);
  }
}

}  // namespace
}  // namespace rudnn::RUDNN_ISA
