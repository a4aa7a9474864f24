#include "freshet/plan.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace freshet {

Plan::Plan(uint32_t buckets) : buckets_(buckets), shift_(64u - static_cast<uint32_t>(std::countr_zero(buckets))) {
  if (buckets < 2 || buckets > 65536 || !std::has_single_bit(buckets))
    throw std::invalid_argument("expected a power of two from 2 to 65536 buckets, found " + std::to_string(buckets));
  cells_.resize(64);
}

void Plan::run(const uint64_t* occurrence_keys, size_t n, const uint32_t* feature_starts, const uint8_t* feature_tables,
               size_t features) {
  if (n >= (1ull << 31)) throw std::invalid_argument("a batch holds fewer than 2^31 occurrences");
  bool rising = feature_starts[0] == 0 && feature_starts[features] == n;
  for (size_t f = 0; f < features; f++) rising = rising && feature_starts[f] <= feature_starts[f + 1];
  if (!rising)
    throw std::invalid_argument("feature_starts must rise from 0 to the number of keys, " + std::to_string(n));
  n_ = n;
  keys.reserve(n);
  tables.reserve(n);
  positions.reserve(n);
  order.reserve(n);
  order_starts.reserve(n + 1);
  counts_.reserve(n);
  uint32_t* starts = bucket_starts.reserve(buckets_ + 1);

  scatter(occurrence_keys, feature_starts, feature_tables, features);
  const uint32_t* ends = bucket_items_.data();
  unique_ = 0;
  for (uint32_t b = 0; b < buckets_; b++) {
    starts[b] = static_cast<uint32_t>(unique_);
    const uint32_t begin = b ? ends[b - 1] : 0;
    if (begin != ends[b]) deduplicate(begin, ends[b]);
  }
  starts[buckets_] = static_cast<uint32_t>(unique_);
  order_starts.data()[unique_] = static_cast<uint32_t>(present_);
}

// Counting sort by bucket; after it bucket_items_[b] is the end of bucket b's items.
void Plan::scatter(const uint64_t* occurrence_keys, const uint32_t* feature_starts, const uint8_t* feature_tables,
                   size_t features) {
  uint32_t* next = bucket_items_.reserve(buckets_ + 1);
  Item* items = items_.reserve(n_);
  int32_t* position = positions.data();
  std::fill_n(next, buckets_, 0u);
  for (size_t i = 0; i < n_; i++) next[occurrence_keys[i] >> shift_] += occurrence_keys[i] != absent_key;
  uint32_t sum = 0;
  for (uint32_t b = 0; b < buckets_; b++) {
    const uint32_t count = next[b];
    next[b] = sum;
    sum += count;
  }
  present_ = sum;
  for (size_t f = 0; f < features; f++) {
    const uint32_t table = feature_tables[f];
    for (uint32_t i = feature_starts[f]; i < feature_starts[f + 1]; i++) {
      const uint64_t key = occurrence_keys[i];
      if (key == absent_key)
        position[i] = -1;
      else
        items[next[key >> shift_]++] = {key, i, table};
    }
  }
}

// Rows are numbered by first occurrence, so the result does not depend on the size of the cells.
void Plan::deduplicate(uint32_t begin, uint32_t end) {
  // Eight cells an item: a branch on a collision would be mispredicted. A usual bucket's still fit the first-level
  // cache.
  const size_t wanted = std::bit_ceil(8 * static_cast<size_t>(end - begin));
  if (wanted > cells_.size()) grow_cells(wanted);
  const uint64_t mask = wanted - 1;
  if (++epoch_ == 0) {
    std::fill(cells_.begin(), cells_.end(), Cell{});
    epoch_ = 1;
  }
  Cell* cells = cells_.data();
  Item* items = items_.data();
  uint64_t* unique_keys = keys.data();
  uint8_t* unique_tables = tables.data();
  int32_t* position = positions.data();
  uint32_t* counts = counts_.data();
  const uint32_t first = static_cast<uint32_t>(unique_);
  uint32_t rows = first;
  for (uint32_t p = begin; p < end; p++) {
    const Item item = items[p];
    uint64_t at = ((item.key * 0x9e3779b97f4a7c15ull) >> 32) & mask;
    for (;; at = (at + 1) & mask) {
      Cell& cell = cells[at];
      if (cell.epoch != epoch_) {
        cell = {item.key, epoch_, rows};
        unique_keys[rows] = item.key;
        unique_tables[rows] = static_cast<uint8_t>(item.table);
        counts[rows - first] = 1;
        items[p].table = rows;
        position[item.occurrence] = static_cast<int32_t>(rows++);
        break;
      }
      if (cell.key == item.key && unique_tables[cell.row] == item.table) {
        counts[cell.row - first]++;
        items[p].table = cell.row;
        position[item.occurrence] = static_cast<int32_t>(cell.row);
        break;
      }
    }
  }
  uint32_t* starts = order_starts.data();
  uint32_t sum = begin;
  for (uint32_t row = first; row < rows; row++) {
    starts[row] = sum;
    const uint32_t count = counts[row - first];
    counts[row - first] = sum;
    sum += count;
  }
  uint32_t* out = order.data();
  for (uint32_t p = begin; p < end; p++) out[counts[items[p].table - first]++] = items[p].occurrence;
  unique_ = rows;
}

void Plan::grow_cells(size_t items) {
  cells_.assign(items, Cell{});
  epoch_ = 0;
}

}  // namespace freshet
