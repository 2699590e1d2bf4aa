// One operator call in every order of the schedule, and whether the results agree.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "state.h"

namespace simt {

namespace {

const std::map<std::string, Order> kNames = {
    {"forward", Order::forward}, {"reverse", Order::reverse}, {"random", Order::random}};

std::vector<Order> orders_from_environment() {
  const char* setting = getenv("RUDNN_SIMT_ORDER");
  std::vector<Order> orders;
  std::stringstream names(setting ? setting : "forward");
  for (std::string name; std::getline(names, name, ',');) {
    if (!kNames.count(name))
      throw std::invalid_argument("RUDNN_SIMT_ORDER must list forward, reverse or random, got '" + name + "'");
    orders.push_back(kNames.at(name));
  }
  if (orders.empty()) throw std::invalid_argument("RUDNN_SIMT_ORDER is empty");
  return orders;
}

const std::string& name_of(Order order) {
  return std::find_if(kNames.begin(), kNames.end(), [&](const auto& pair) { return pair.second == order; })->first;
}

// What a buffer held when the first order registered it, and when that order had ended.
struct Snapshot {
  std::vector<char> before, after;
};
std::vector<Snapshot> snapshots;  // of the buffers in the order of their registration; empty for inputs
bool keeps_snapshots = false;
size_t current = 0;  // index in orders()

std::vector<char> contents(const Range& range) { return {range.begin, range.end}; }

bool is_result(const Memory& buffer) { return buffer.access == Access::output || buffer.access == Access::update; }

void compare_with_first_order(const Memory& buffer, const std::vector<char>& first) {
  const auto [mine, theirs] = std::mismatch(buffer.begin, buffer.end, first.begin(), first.end());
  if (mine == buffer.end) return;
  fail_at_frames("order-dependent",
                 "the byte at offset " + std::to_string(mine - buffer.begin) + " of " + buffer.name +
                     " differs between the orders " + name_of(orders().front()) + " and " + name_of(current_order()),
                 launch.frames);
}

void keep_or_compare_results() {
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!is_result(buffers[i])) continue;
    if (current == 0)
      snapshots[i].after = contents(buffers[i]);
    else
      compare_with_first_order(buffers[i], snapshots[i].after);
  }
}

// The engine for one operator call: calls of several threads take turns.
class Turn {
 public:
  Turn() {
    if (taken_) throw std::logic_error("an operator is called from inside another one's run on the bench");
    mutex_.lock();
    taken_ = true;
    keeps_snapshots = orders().size() > 1;
  }
  ~Turn() {
    keeps_snapshots = false;
    snapshots.clear();
    current = 0;
    taken_ = false;
    mutex_.unlock();
  }

 private:
  static inline std::mutex mutex_;
  static inline thread_local bool taken_ = false;
};

}  // namespace

std::vector<Order>& orders() {
  static std::vector<Order> value = orders_from_environment();
  return value;
}

Order current_order() { return orders()[current]; }

void start_from_snapshot(size_t index) {
  if (!keeps_snapshots) return;
  const Memory& buffer = buffers[index];
  if (index == snapshots.size()) {
    snapshots.push_back({});
    if (buffer.access != Access::input) snapshots.back().before = contents(buffer);
  } else if (buffer.access != Access::input) {
    const std::vector<char>& before = snapshots[index].before;
    if (before.size() != buffer.size())
      throw std::logic_error("another order registers " + buffer.name + " with another size");
    std::copy(before.begin(), before.end(), buffer.begin);
  }
}

void run_in_each_order(const std::function<void()>& call) {
  const Turn turn;
  for (current = 0; current < orders().size(); ++current) {
    const BufferScope scope;
    call();
    check_outputs();
    if (keeps_snapshots) keep_or_compare_results();
  }
}

}  // namespace simt
