// The plan of a batch in one store group: unique rows in order of their buckets, and who uses them.
#pragma once

#include <memory>
#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

constexpr u64 absent_key = 0;  // of a null: makes no row

// An array that only grows. A larger one replaces it when needed, so whoever still looks at the old one may go on.
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
  explicit Plan(u32 buckets);  // a power of two, 2 to 65536

  // Plan N occurrences, feature-major: feature f has [feature_starts[f], feature_starts[f + 1]) and its rows live in
  // table feature_tables[f]. Throws std::invalid_argument if the starts do not rise from 0 to N.
  void run(const u64* keys, size_t n, const u32* feature_starts, const u8* feature_tables, size_t features);

  u32 buckets() const { return buckets_; }
  size_t occurrences() const { return n_; }
  size_t unique() const { return unique_; }
  size_t present() const { return present_; }  // occurrences whose key is not absent

  Buffer<u64> keys;           // (U,)
  Buffer<u8> tables;          // (U,)
  Buffer<i32> positions;      // (N,) row of each occurrence, -1 for absent_key
  Buffer<u32> bucket_starts;  // (buckets + 1,) unique rows of each bucket
  Buffer<u32> order;          // (present,) occurrences of row 0 rising, then of row 1, ...
  Buffer<u32> order_starts;   // (U + 1,)

 private:
  struct Cell {
    u64 key;
    u32 epoch;
    u32 row;
  };
  struct Item {
    u64 key;
    u32 occurrence;
    u32 table;  // then the row
  };
  void scatter(const u64* occurrence_keys, const u32* feature_starts, const u8* feature_tables, size_t features);
  void deduplicate(u32 begin, u32 end);
  void grow_cells(size_t items);

  u32 buckets_, shift_;
  size_t n_ = 0, unique_ = 0, present_ = 0;
  Buffer<Item> items_;         // occurrences in order of their buckets
  Buffer<u32> bucket_items_;   // (buckets + 1,) ends, then starts, of each bucket's items
  Buffer<u32> counts_;         // occurrences of each unique row of the present bucket
  std::vector<Cell> cells_;    // open addressing; a cell counts only if its epoch is the present one
  u32 epoch_ = 0;
};

}  // namespace freshet
