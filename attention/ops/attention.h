// The interface between the registered ops and the backend that this build links.
#pragma once

#include <algorithm>

#include "common/tensor.h"

namespace rudnn {

// The sizes of a head that are taken at most.
inline constexpr int64_t kMaxHeadDim = 1024;

struct AttentionOptions {
  float scale = 1;
  float softcap = 0;  // 0 for none
  bool is_causal = false;
  int64_t window_left = -1;  // -1 for no bound
  int64_t window_right = -1;
  bool accelerated = false;
};

// Of one dtype and device; the last axis is contiguous, the others have any strides. B, Hq, Sq and Sk may be 0; Hq is a
// multiple of Hkv >= 1, and D and Dv are 1 to kMaxHeadDim.
struct AttentionInputs {
  const Tensor* query = nullptr;  // [B, Hq, Sq, D]
  const Tensor* key = nullptr;    // [B, Hkv, Sk, D]
  const Tensor* value = nullptr;  // [B, Hkv, Sk, Dv]
  const Tensor* mask = nullptr;   // bool, optional, each axis 1 or that of [B, Hq, Sq, Sk], any strides
  const Tensor* bias = nullptr;   // the query's dtype or float32, optional, likewise
  const Tensor* sinks = nullptr;  // [Hq], contiguous, the query's dtype or float32, optional
};

// In float32: s = scale * q.k, capped to softcap * tanh(s / softcap); the bias is added; the softmax's sum over the
// keys that take part has the sink's score in it; then times v, rounded once. A key is excluded by the mask, by a bias
// of -inf, by causality (key j of query i for j > i + Sk - Sq) or by the window (more than its bounds left or right of
// i + Sk - Sq), and nothing that belongs to it shows then, be it NaN. A row without keys comes out 0. lse is the
// logarithm of the sum. What a row comes out as does not depend on the others, nor on the number of threads.
struct AttentionCall {
  AttentionInputs inputs;
  AttentionOptions options;
  const Tensor* output = nullptr;  // [B, Hq, Sq, Dv], contiguous
  const Tensor* lse = nullptr;     // float32 [B, Hq, Sq], contiguous
};

// Probabilities are computed again from lse. Gradients are contiguous, of the shape and dtype of their argument, each
// optional; sums are in a fixed order.
struct AttentionBackwardCall {
  AttentionInputs inputs;
  AttentionOptions options;
  const Tensor* grad = nullptr;    // [B, Hq, Sq, Dv], the last axis contiguous
  const Tensor* output = nullptr;  // [B, Hq, Sq, Dv], the last axis contiguous
  const Tensor* lse = nullptr;     // float32 [B, Hq, Sq], contiguous
  const Tensor* grad_query = nullptr;
  const Tensor* grad_key = nullptr;
  const Tensor* grad_value = nullptr;
  const Tensor* grad_bias = nullptr;
  const Tensor* grad_sinks = nullptr;
};

void launch_attention(const AttentionCall& call);
void launch_attention_backward(const AttentionBackwardCall& call);

// How far keys may be from the position of a query, which is that of the query + Sk - Sq.
struct KeyBounds {
  int64_t before = 0;
  int64_t after = 0;
};

inline KeyBounds key_bounds(const AttentionInputs& inputs, const AttentionOptions& options) {
  const int64_t all = inputs.query->size(2) + inputs.key->size(2);
  const auto bounded = [&](int64_t window) { return window < 0 ? all : std::min(window, all); };
  return {bounded(options.window_left), options.is_causal ? 0 : bounded(options.window_right)};
}

// Whether the hardware multiplies matrices of this dtype, which is what `accelerated` asks for.
bool has_matrix_units(DType dtype);

}  // namespace rudnn
