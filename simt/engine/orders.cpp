// One operator call in every order of the schedule, and whether the results agree.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <sstream>

#include "state.h"

namespace simt {

namespace {

constexpr const char* kNames[] = {"forward", "reverse", "random"};  // of Order

std::vector<Order> orders_from_environment() {
  const char* setting = getenv("RUDNN_SIMT_ORDER");
  std::vector<Order> orders;
  std::stringstream names(setting ? setting : "forward");
  for (std::string name; std::getline(names, name, ',');) {
    const auto found = std::find(std::begin(kNames), std::end(kNames), name);
    if (found == std::end(kNames))
      throw std::invalid_argument("RUDNN_SIMT_ORDER must list forward, reverse or random, got '" + name + "'");
    orders.push_back(static_cast<Order>(found - kNames));
  }
  if (orders.empty()) throw std::invalid_argument("RUDNN_SIMT_ORDER is empty");
  return orders;
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

void keep_or_compare_results() {
  auto snapshot = snapshots.begin();
  for (const Memory& result : buffers) {
    if (!result.is_result()) continue;
    std::vector<char>& first = (snapshot++)->after;
    if (current == 0) first = contents(result);
    const char* mine = std::mismatch(result.begin, result.end, first.begin()).first;
    if (mine == result.end) continue;
    const char *order = kNames[static_cast<int>(orders()[0])], *other = kNames[static_cast<int>(current_order())];
    fail_at_frames("order-dependent",
                   "the byte at offset " + std::to_string(mine - result.begin) + " of " + result.name +
                       " differs between the orders " + order + " and " + other,
                   launch.frames);
  }
}

// The engine for one operator call: calls of several threads take turns.
class Turn {
 public:
  Turn() {
    if (taken_) throw std::logic_error("an operator is called from inside another one's run on the bench");
    taken_ = true;
    keeps_snapshots = orders().size() > 1;
  }
  ~Turn() {
    taken_ = keeps_snapshots = false;
    snapshots.clear();
    current = 0;
  }

 private:
  static inline std::recursive_mutex mutex_;
  static inline bool taken_ = false;
  const std::lock_guard<std::recursive_mutex> lock_{mutex_};
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
