// Taking the largest of many numbers one after the other. Integers throughout, so that the compiler turns each loop
// into vectors of whatever width it has.
#include <cstdint>

#include "cpu/selection.h"

namespace rudnn::RUDNN_ISA {

// Less than every order_of.
inline constexpr int32_t kTaken = INT32_MIN;

// An integer for each float, in the order of the floats; NaN counts as -inf, and -0 as 0.
inline int32_t order_of(float value) {
  const float ordered = value == value ? value + 0.0f : -__builtin_inff();
  int32_t bits;
  __builtin_memcpy(&bits, &ordered, sizeof(bits));
  return bits ^ ((bits >> 31) & INT32_MAX);
}

// The float of which order_of is `order`.
inline float value_of(int32_t order) {
  const int32_t bits = order ^ ((order >> 31) & INT32_MAX);
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline int32_t largest_of(const int32_t* orders, int32_t length) {
  int32_t largest = kTaken;
  for (int32_t i = 0; i < length; ++i) largest = orders[i] > largest ? orders[i] : largest;
  return largest;
}

// The first place that holds `order`, or `length`.
inline int32_t first_equal(const int32_t* orders, int32_t length, int32_t order) {
  int32_t first = length;
  for (int32_t i = 0; i < length; ++i) {
    const int32_t place = orders[i] == order ? i : length;
    first = place < first ? place : first;
  }
  return first;
}

// The largest orders, lower places first among equals. The maximum of each block of orders is at hand, so that only
// maxima and one block are searched for the next.
class Selection {
 public:
  // Of `orders`, which holds `length` numbers and is as large as selection_orders says, and is written to.
  Selection(int32_t* orders, int32_t* maxima, int32_t length)
      : orders_(orders), maxima_(maxima), blocks_((length + kSelectionBlock - 1) / kSelectionBlock) {
    for (int32_t i = length; i < blocks_ * kSelectionBlock; ++i) orders_[i] = kTaken;
    for (int32_t block = 0; block < blocks_; ++block) measure(block);
  }

  // The place of the largest that has not been taken.
  int32_t take() {
    const int32_t block = first_equal(maxima_, blocks_, largest_of(maxima_, blocks_));
    int32_t* orders = orders_ + block * kSelectionBlock;
    const int32_t place = first_equal(orders, kSelectionBlock, maxima_[block]);
    orders[place] = kTaken;
    measure(block);
    return block * kSelectionBlock + place;
  }

 private:
  void measure(int32_t block) { maxima_[block] = largest_of(orders_ + block * kSelectionBlock, kSelectionBlock); }

  int32_t* orders_;
  int32_t* maxima_;
  int32_t blocks_;
};

}  // namespace rudnn::RUDNN_ISA
