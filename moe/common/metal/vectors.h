// Neighbouring elements, moved at once. Shader code.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace rudnn {

template <typename T, int kCount>
struct VectorOf {
  using type = vec<T, kCount>;
};
template <typename T>
struct VectorOf<T, 1> {
  using type = T;
};

// How many elements a thread moves at once. Other shapes have these members too.
template <int vector>
struct Vectors {
  static constant constexpr int kVector = vector;
  using Floats = typename VectorOf<float, vector>::type;
};

template <typename Shape, typename T>
inline typename VectorOf<T, Shape::kVector>::type load_vector(device const T* address) {
  using Vector = typename VectorOf<T, Shape::kVector>::type;
  return *reinterpret_cast<device const Vector*>(address);
}
template <typename Shape, typename T>
inline typename Shape::Floats load_floats(device const T* address) {
  return typename Shape::Floats(load_vector<Shape>(address));
}
// Rounds to nearest, ties to even.
template <typename Shape, typename T>
inline void store_floats(device T* address, typename Shape::Floats values) {
  using Vector = typename VectorOf<T, Shape::kVector>::type;
  *reinterpret_cast<device Vector*>(address) = Vector(values);
}

}  // namespace rudnn
