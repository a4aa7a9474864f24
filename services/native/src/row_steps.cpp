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
    std::sort(order_.begin(), order_.end(), [&](u32 a, u32 b) { return of(a) < of(b); });
  }

  // Where the row stands, or `end` of the bucket.
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

 private:
  std::pair<u64, u8> of(u32 i) const { return {keys_.keys[i], keys_.tables[i]}; }

  const Keys& keys_;
  std::vector<u32>& order_;
  u32 first_ = 0, end_ = 0;
};

}  // namespace

size_t RowSteps::step(const Keys& mine, float* values, float* states, const Keys& theirs, const float* gradients,
                      u32 buckets) const {
  static thread_local std::vector<u8> record;
  static thread_local std::vector<u32> order;
  record.assign(layout_.record_bytes(), 0);
  const Row row = layout_.row(record.data());
  const u32 width = layout_.width(), state_floats = layout_.state_floats();
  Finder finder(theirs, order);
  size_t found = 0;
  for (u32 b = 0; b < buckets; b++) {
    const u32 first = mine.bucket_starts[b], end = mine.bucket_starts[b + 1];
    if (first == end || theirs.bucket_starts[b] == theirs.bucket_starts[b + 1]) continue;
    finder.open(theirs.bucket_starts[b], theirs.bucket_starts[b + 1]);
    for (u32 i = first; i < end; i++) {
      const u32 at = finder.find(mine.keys[i], mine.tables[i]);
      if (at == finder.end()) continue;
      float* state = states + size_t{i} * state_floats;
      layout_.store(row, values + size_t{i} * width);
      std::copy_n(state, state_floats, layout_.state(row));
      u8 stepped = 0;
      layout_.step(&row, gradients + size_t{at} * width, 1, &stepped);
      layout_.load(row, values + size_t{i} * width);
      std::copy_n(layout_.state(row), state_floats, state);
      found += stepped;
    }
  }
  return found;
}

}  // namespace freshet
