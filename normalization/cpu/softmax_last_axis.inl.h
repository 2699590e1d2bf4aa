// softmax_last_axis, one loop for every vector width.
#include "cpu/softmax_last_axis.h"

namespace rudnn::RUDNN_ISA {
namespace {

// The exponentials of a row wait in float32 for their sum: in the output itself where it is float32.
inline float* exponentials(float* output, float*) { return output; }
template <class T>
inline float* exponentials(T*, float* scratch) {
  return scratch;
}

template <class T>
[[gnu::flatten]] void forward(const SoftmaxArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.input) + row * width;
    const T* next_x = row + 1 < end ? x + width : x;
    T* y = static_cast<T*>(args.output) + row * width;
    float* exponential = exponentials(y, scratch);
    // NaN is left out of the maximum, and comes back in the exponential and so in the sum.
    const Vec largest = broadcast(max_of(x, width, [](Vec value) { return value; }));
    const double sum = sum_vectors<1>(width, [&](int64_t offset, auto lanes, Vec* total) {
                         __builtin_prefetch(next_x + offset);
                         const Vec value = exp(load(x + offset, lanes) - largest);
                         store(exponential + offset, value, lanes);
                         total[0] = total[0] + keep(value, lanes, broadcast(0.0f));
                       }).value[0];
    const Vec reciprocal = broadcast(static_cast<float>(1.0 / sum));
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      store(y + offset, load(exponential + offset, lanes) * reciprocal, lanes);
    });
  }
}

// The gradient of x is y * (grad - sum(grad * y)).
template <class T>
[[gnu::flatten]] void backward(const SoftmaxBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* grad = static_cast<const T*>(args.grad) + row * width;
    const T* y = static_cast<const T*>(args.output) + row * width;
    T* grad_input = static_cast<T*>(args.grad_input) + row * width;
    const int64_t to_next_row = row + 1 < end ? width : 0;
    const double product = sum_vectors<1>(width, [&](int64_t offset, auto lanes, Vec* total) {
                             total[0] = fma(load(grad + offset, lanes), load(y + offset, lanes), total[0]);
                           }).value[0];
    const Vec mean = broadcast(static_cast<float>(product));
    for_each_vector(width, [&](int64_t offset, auto lanes) {
      __builtin_prefetch(grad + to_next_row + offset);
      __builtin_prefetch(y + to_next_row + offset);
      store(grad_input + offset, load(y + offset, lanes) * (load(grad + offset, lanes) - mean), lanes);
    });
  }
}

}  // namespace

void softmax_last_axis_rows(const SoftmaxArgs& args, int64_t begin, int64_t end, float* scratch) {
  visit_dtype(args.dtype, [&](auto element) { forward<typename decltype(element)::type>(args, begin, end, scratch); });
}

void softmax_last_axis_backward_rows(const SoftmaxBackwardArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) { backward<typename decltype(element)::type>(args, begin, end); });
}

}  // namespace rudnn::RUDNN_ISA
