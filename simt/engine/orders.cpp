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

// What a result's buffer held when the first order registered it, and when that order had ended.
struct Snapshot {
  std::vector<char> before, after;
};
std::vector<Snapshot> snapshots;  // of the results in the order of their registration
size_t registered = 0;            // results of the current order so far
bool keeps_snapshots = false;
size_t current = 0;  // index in orders()

std::vector<char> contents(const Range& range) { return {range.begin, range.end}; }

void compare_with_first_order(const Memory& result, const std::vector<char>& first) {
  const auto [mine, theirs] = std::mismatch(result.begin, result.end, first.begin(), first.end());
  if (mine == result.end) return;
  fail_at_frames("order-dependent",
                 "the byte at offset " + std::to_string(mine - result.begin) + " of " + result.name +
                     " differs between the orders " + name_of(orders().front()) + " and " + name_of(current_order()),
                 launch.frames);
}

void keep_or_compare_results() {
  size_t index = 0;
  for (const Memory& buffer : buffers) {
    if (!buffer.is_result()) continue;
    Snapshot& snapshot = snapshots[index++];
    if (current == 0)
      snapshot.after = contents(buffer);
    else
      compare_with_first_order(buffer, snapshot.after);
  }
}

// The engine for one operator call: calls of several threads take turns.
class Turn {
 public:
  Turn() {
    if (taken_) throw std::logic_error("an operator is called from inside another one's run on the bench");
    lock_.lock();
    keeps_snapshots = orders().size() > 1;
    taken_ = true;
  }
  ~Turn() {
    keeps_snapshots = false;
    snapshots.clear();
    current = 0;
    taken_ = false;
  }

 private:
  static inline std::mutex mutex_;
  static inline thread_local bool taken_ = false;
  std::unique_lock<std::mutex> lock_{mutex_, std::defer_lock};
};

}  // namespace

std::vector<Order>& orders() {
  static std::vector<Order> value = orders_from_environment();
  return value;
}

Order current_order() { return orders()[current]; }

void start_from_snapshot(const Memory& result) {
  if (!keeps_snapshots) return;
  const size_t index = registered++;
  if (index == snapshots.size()) {
    snapshots.push_back({contents(result), {}});
    return;
  }
  const std::vector<char>& before = snapshots[index].before;
  if (before.size() != result.size())
    throw std::logic_error("another order registers " + result.name + " with another size");
  std::copy(before.begin(), before.end(), result.begin);
}

void run_in_each_order(const std::function<void()>& call) {
  const Turn turn;
  for (current = 0; current < orders().size(); ++current) {
    const BufferScope scope;
    registered = 0;
    call();
    check_outputs();
    if (keeps_snapshots) keep_or_compare_results();
  }
}

}  // namespace simt
