// combine, its gradients, and the gradient of dispatch, one loop for every vector width.
#include "cpu/combine.h"

namespace rudnn::RUDNN_ISA {
namespace {

inline bool in_range(int64_t index, int64_t length) { return index >= 0 && index < length; }

// Sums kVectors vectors of a token's rows at an offset; what a slot costs is shared by as many as there are.
template <int kVectors, class T, class Lanes>
inline void sum_slots(const CombineArgs& args, int64_t token, int64_t offset, Lanes lanes) {
  const T* input = static_cast<const T*>(args.input) + offset;
  Vec sums[kVectors];
  for (auto& sum : sums) sum = broadcast(0.0f);
  for (int64_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot) {
    const int64_t row = args.slot_rows[slot];
    if (!in_range(row, args.rows)) continue;
    const Vec weight = broadcast(args.weights != nullptr ? args.weights[slot] : 1.0f);
    for (int i = 0; i < kVectors; ++i) {
      sums[i] = fma(weight, load(input + row * args.width + i * kWidth, lanes), sums[i]);
    }
  }
  T* output = static_cast<T*>(args.output) + token * args.width + offset;
  for (int i = 0; i < kVectors; ++i) store(output + i * kWidth, sums[i], lanes);
}

template <class T>
[[gnu::flatten]] void forward(const CombineArgs& args, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;
  for (int64_t token = begin; token < end; ++token) {
    int64_t offset = 0;
    for (; offset + kVectors * kWidth <= args.width; offset += kVectors * kWidth) {
      sum_slots<kVectors, T>(args, token, offset, Full{});
    }
    for_each_vector(args.width - offset,
                    [&](int64_t rest, auto lanes) { sum_slots<1, T>(args, token, offset + rest, lanes); });
  }
}

template <class T>
inline float dot(const T* a, const T* b, int64_t width) {
  return static_cast<float>(sum_vectors<1>(width, [&](int64_t offset, auto lanes, Vec* total) {
                              total[0] = fma(load(a + offset, lanes), load(b + offset, lanes), total[0]);
                            }).value[0]);
}

template <class T>
[[gnu::flatten]] void backward_rows(const CombineBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t slot = args.row_slots[row];
    T* grad_input = args.grad_input == nullptr ? nullptr : static_cast<T*>(args.grad_input) + row * width;
    if (!in_range(slot, args.rows)) {
      if (grad_input == nullptr) continue;
      for_each_vector(width, [&](int64_t offset, auto lanes) { store(grad_input + offset, broadcast(0.0f), lanes); });
      continue;
    }
    const T* grad = static_cast<const T*>(args.grad) + slot / args.top_k * width;
    if (args.grad_weights != nullptr && args.slot_rows[slot] == row) {
      args.grad_weights[slot] = dot(static_cast<const T*>(args.input) + row * width, grad, width);
    }
    if (grad_input == nullptr) continue;
    const Vec weight = broadcast(args.weights[slot]);
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      store(grad_input + offset, weight * load(grad + offset, lanes), lanes);
    });
  }
}

template <class T>
[[gnu::flatten]] void backward_slots(const CombineBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t row = args.slot_rows[slot];
    if (!in_range(row, args.rows)) {
      args.grad_weights[slot] = 0.0f;
    } else if (args.row_slots[row] != slot) {
      const T* grad = static_cast<const T*>(args.grad) + slot / args.top_k * width;
      args.grad_weights[slot] = dot(static_cast<const T*>(args.input) + row * width, grad, width);
    }
  }
}

}  // namespace

void combine_tokens(const CombineArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, begin, end); });
}

void combine_backward_rows(const CombineBackwardArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { backward_rows<typename decltype(element)::type>(args, begin, end); });
}

void combine_backward_slots(const CombineBackwardArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { backward_slots<typename decltype(element)::type>(args, begin, end); });
}

}  // namespace rudnn::RUDNN_ISA
