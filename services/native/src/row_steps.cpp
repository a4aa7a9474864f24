#include "freshet/row_steps.hpp"

#include <algorithm>
#include <utility>

namespace freshet {
namespace {

constexpr u32 few = 16;  // of a bucket: compared one by one; more are found by binary search

// Finds a row among those of one bucket.
class Finder {
 public:
  Finder(const Keys& keys, std::vector<u32>& order) : keys_(keys), order_(order) {}

  void open(u32 first, u32 end) {
    first_ = first, end_ = end;
    if (end - first <= few) return;
    order_.resize(end - first);
    for (u32 i = first; i < end; i++) order_[i - first] = i;
    std::stable_sort(order_.begin(), order_.end(), [&](u32 a, u32 b) { return of(a) < of(b); });
  }

  // Where the row stands first, or `end` of the bucket.
  u32 find(u64 key, u8 table) const {
    if (end_ - first_ <= few) {
      for (u32 i = first_; i < end_; i++)
        if (keys_.keys[i] == key && keys_.tables[i] == table) return i;
      return end_;
    }
    const auto wanted = std::pair(key, table);
    const auto at = std::lower_bound(order_.begin(), order_.end(), wanted, [&](u32 i, const auto& row) { return of(i) < row; });
    return at != order_.end() && of(*at) == wanted ? *at : end_;
  }

  u32 end() const { return end_; }

  // Whether the row stands at this place, too: gradients of a row stand one behind the other.
  bool is_at(u32 at, u64 key, u8 table) const { return at != end_ && of(at) == std::pair(key, table); }

 private:
  std::pair<u64, u8> of(u32 i) const { return {keys_.keys[i], keys_.tables[i]}; }

  const Keys& keys_;
  std::vector<u32>& order_;
  u32 first_ = 0, end_ = 0;
};

}  // namespace

size_t RowSteps::step(const Keys& mine, float* values, float* states, const Keys& theirs, const float* gradients,
                      u32 buckets) const {
  static thread_local std::vector<u32> order;
  const u32 width = layout_.width(), state_floats = layout_.state_floats();
  Finder finder(theirs, order);
  size_t found = 0;
  for (u32 b = 0; b < buckets; b++) {
    const u32 first = mine.bucket_starts[b], end = mine.bucket_starts[b + 1];
    if (first == end || theirs.bucket_starts[b] == theirs.bucket_starts[b + 1]) continue;
    finder.open(theirs.bucket_starts[b], theirs.bucket_starts[b + 1]);
    for (u32 i = first; i < end; i++) {
      for (u32 at = finder.find(mine.keys[i], mine.tables[i]); finder.is_at(at, mine.keys[i], mine.tables[i]); at++)
        found += layout_.step_copy(values + size_t{i} * width, states + size_t{i} * state_floats, gradients + size_t{at} * width);
    }
  }
  return found;
}

}  // namespace freshet
