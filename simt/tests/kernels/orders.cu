// Operator calls as a family's launchers make them, in a build without the checker: what the comparison of orders
// finds.
#include <thread>

#include "common/cuda/device.cuh"
#include "simt/tests/kernels/entry.h"

using namespace rudnn;

constexpr int kThreads = 64;

// kWhich: 0 sums the same for every order, 1 depends on which thread comes last, 2 counts in y.
template <int kWhich>
__global__ void ordered(float* y, const float* x) {
  const int i = threadIdx.x;
  if (kWhich == 0) y[i] = x[i] + x[kThreads - 1 - i];
  if (kWhich == 1) y[i / 32] = x[i];
  if (kWhich == 2) y[i] += x[i];
}

__global__ void halves(float* y, float* scratch, const float* x, int half) {
  const int i = threadIdx.x;
  scratch[i] = x[i];
  if (i / 32 == half) y[i] = 2 * scratch[i];
}

template <int kWhich>
void call(float* y, const float* x, simt::Access access) {
  simt::run_in_each_order([&] {
    simt::register_buffer(x, kThreads * sizeof *x, "x", simt::Access::input);
    simt::register_buffer(y, kThreads * sizeof *y, "y", access);
    launch(ordered<kWhich>, {1, kThreads}, y, x);
  });
}

// Two launches write a part of one output each.
ENTRY(run_two_launches, float* y, const float* x) {
  ENTRY_BODY(simt::run_in_each_order([&] {
    std::vector<float> scratch(kThreads);
    simt::register_buffer(x, kThreads * sizeof *x, "x", simt::Access::input);
    simt::register_buffer(scratch.data(), scratch.size() * sizeof(float), "scratch", simt::Access::scratch);
    for (int half = 0; half < 2; ++half) {
      simt::register_buffer(y, kThreads * sizeof *y, "y", simt::Access::output);
      launch(halves, {1, kThreads}, y, scratch.data(), x, half);
    }
  }));
}
ENTRY(run_same, float* y, const float* x) { ENTRY_BODY(call<0>(y, x, simt::Access::output)); }
ENTRY(run_order_dependent, float* y, const float* x) { ENTRY_BODY(call<1>(y, x, simt::Access::update)); }
ENTRY(run_update, float* y, const float* x) { ENTRY_BODY(call<2>(y, x, simt::Access::update)); }
ENTRY(run_nested, float* y, const float* x) {
  ENTRY_BODY(simt::run_in_each_order([&] { call<0>(y, x, simt::Access::output); }));
}
// `count` calls from each of several threads, which all write their own part of y.
ENTRY(run_threads, int64_t threads, int64_t count, float* y, const float* x) {
  ENTRY_BODY({
    std::vector<std::thread> running;
    for (int64_t t = 0; t < threads; ++t)
      running.emplace_back([=] {
        for (int64_t i = 0; i < count; ++i) call<2>(y + t * kThreads, x, simt::Access::update);
      });
    for (std::thread& thread : running) thread.join();
  });
}
ENTRY(set_orders, int64_t all) {
  ENTRY_BODY(simt::orders() = {simt::Order::forward};
             if (all) simt::orders() = {simt::Order::forward, simt::Order::reverse, simt::Order::random});
}
