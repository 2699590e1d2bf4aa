// Gradients of a norm's parameters: sums over all rows, in an order that depends on the shape alone. Shader code.
#pragma once

#include "metal/row.h"

namespace rudnn {

// Where the threads of a row leave the sums over their rows. A team has a partial row of its own, so partials is
// [teams in the grid, width]. Not used if the sums are not wanted, since partials is not there then.
template <typename Shape>
struct ParameterSum {
  using Floats = typename Shape::Floats;

  device float* partial = nullptr;
  Floats held[Shape::kHeld];

  void clear(device float* partials, Team team, long width) {
    partial = partials + team.row * width;
    FOR_EACH_VECTOR(at, Shape, team, width) {
      if (at.held)
        held[at.slot] = Floats(0.0f);
      else
        store_floats<Shape>(partial + at.offset, Floats(0.0f));
    }
  }

  void add(Floats values, Place at) {
    if (at.held)
      held[at.slot] += values;
    else
      store_floats<Shape>(partial + at.offset, load_floats<Shape>(partial + at.offset) + values);
  }

  void store(Team team, long width) const {
    FOR_EACH_VECTOR(at, Shape, team, width) {
      const Floats values = held[at.slot];
      if (at.held) store_floats<Shape>(partial + at.offset, values);
    }
  }
};

}  // namespace rudnn
