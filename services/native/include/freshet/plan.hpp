// The plan of a batch in one store group: unique rows in order of their buckets, and the samples that use them.
#pragma once

#include <memory>
#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

constexpr uint64_t kAbsentKey = 0;  // of a null: makes no row

// An array that only grows. A larger one replaces it when needed; a reader of the old one may go on.
template <typename T>
class Buffer {
 public:
  T* reserve(size_t n) {
    if (n > capacity_) {
      capacity_ = n + n / 4;
      data_ = std::shared_ptr<T[]>(new T[capacity_]());
    }
    return data_.get();
  }
  const std::shared_ptr<T[]>& shared() const { return data_; }
  T* data() const { return data_.get(); }

 private:
  std::shared_ptr<T[]> data_ = std::shared_ptr<T[]>(new T[1]());
  size_t capacity_ = 1;
};

// Not thread-safe: a lane has its own. Results are overwritten by the next `run`.
class Plan {
 public:
  explicit Plan(uint32_t buckets);  // a power of two, 2 to 65536

  // Plan N occurrences, feature-major: feature f has [feature_starts[f], feature_starts[f + 1]) and its rows live in
  // table feature_tables[f]. Throws std::invalid_argument if the starts do not rise from 0 to N.
  void run(const uint64_t* keys, size_t n, const uint32_t* feature_starts, const uint8_t* feature_tables,
           size_t features);

  uint32_t buckets() const { return buckets_; }
  size_t occurrences() const { return n_; }
  size_t unique() const { return unique_; }
  size_t present() const { return present_; }  // occurrences whose key is not absent

  Buffer<uint64_t> keys;           // (U,)
  Buffer<uint8_t> tables;          // (U,)
  Buffer<int32_t> positions;       // (N,) row of each occurrence, -1 for kAbsentKey
  Buffer<uint32_t> bucket_starts;  // (buckets + 1,) unique rows of each bucket
  Buffer<uint32_t> order;          // (present,) occurrences of row 0 rising, then of row 1, ...
  Buffer<uint32_t> order_starts;   // (U + 1,)

 private:
  struct Cell {
    uint64_t key;
    uint32_t epoch;
    uint32_t row;
  };
  struct Item {
    uint64_t key;
    uint32_t occurrence;
    uint32_t table;  // then the row
  };
  void scatter(const uint64_t* occurrence_keys, const uint32_t* feature_starts, const uint8_t* feature_tables,
               size_t features);
  void deduplicate(uint32_t begin, uint32_t end);
  void grow_cells(size_t items);

  uint32_t buckets_, shift_;
  size_t n_ = 0, unique_ = 0, present_ = 0;
  Buffer<Item> items_;             // occurrences in order of their buckets
  Buffer<uint32_t> bucket_items_;  // (buckets + 1,) ends, then starts, of each bucket's items
  Buffer<uint32_t> counts_;        // occurrences of each unique row of the present bucket
  std::vector<Cell> cells_;        // open addressing; a cell counts only if its epoch is the present one
  uint32_t epoch_ = 0;
};

}  // namespace freshet
