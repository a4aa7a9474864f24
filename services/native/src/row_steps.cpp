#include "freshet/row_steps.hpp"

#include <algorithm>
#include <utility>

namespace freshet {
namespace {

constexpr uint32_t kFew = 16;  // of a bucket: compared one by one; more are found by binary search

// Finds a row among those of one bucket.
class Finder {
 public:
  Finder(const Keys& keys, std::vector<uint32_t>& order) : keys_(keys), order_(order) {}

  void open(uint32_t first, uint32_t end) {
    first_ = first, end_ = end;
    if (end - first <= kFew) return;
    order_.resize(end - first);
    for (uint32_t i = first; i < end; i++) order_[i - first] = i;
    std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) { return of(a) < of(b); });
  }

  // The first place of the row, or `end` of the bucket.
  uint32_t find(uint64_t key, uint8_t table) const {
    if (end_ - first_ <= kFew) {
      for (uint32_t i = first_; i < end_; i++)
        if (keys_.keys[i] == key && keys_.tables[i] == table) return i;
      return end_;
    }
    const auto wanted = std::pair(key, table);
    const auto at = std::lower_bound(order_.begin(), order_.end(), wanted,
                                     [&](uint32_t i, const auto& row) { return of(i) < row; });
    return at != order_.end() && of(*at) == wanted ? *at : end_;
  }

  uint32_t end() const { return end_; }

  // Whether this place has the row, too: gradients of a row follow each other.
  bool is_at(uint32_t at, uint64_t key, uint8_t table) const { return at != end_ && of(at) == std::pair(key, table); }

 private:
  std::pair<uint64_t, uint8_t> of(uint32_t i) const { return {keys_.keys[i], keys_.tables[i]}; }

  const Keys& keys_;
  std::vector<uint32_t>& order_;
  uint32_t first_ = 0, end_ = 0;
};

}  // namespace

size_t RowSteps::step(const Keys& mine, float* values, float* states, const Keys& theirs, const float* gradients,
                      uint32_t buckets) const {
  static thread_local std::vector<uint32_t> order;
  const uint32_t width = layout_.width(), state_floats = layout_.state_floats();
  Finder finder(theirs, order);
  size_t found = 0;
  for (uint32_t b = 0; b < buckets; b++) {
    const uint32_t first = mine.bucket_starts[b], end = mine.bucket_starts[b + 1];
    if (first == end || theirs.bucket_starts[b] == theirs.bucket_starts[b + 1]) continue;
    finder.open(theirs.bucket_starts[b], theirs.bucket_starts[b + 1]);
    for (uint32_t i = first; i < end; i++) {
      for (uint32_t at = finder.find(mine.keys[i], mine.tables[i]); finder.is_at(at, mine.keys[i], mine.tables[i]);
           at++)
        found += layout_.step_copy(values + size_t{i} * width, states + size_t{i} * state_floats,
                                   gradients + size_t{at} * width);
    }
  }
  return found;
}

}  // namespace freshet
