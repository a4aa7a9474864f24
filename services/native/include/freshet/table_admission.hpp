// Admission by count: how often keys without a row were seen, in a fixed amount of memory.
#pragma once

#include <algorithm>
#include <memory>

#include "freshet/simd.hpp"

namespace freshet {

// A counting sketch of one table: two 8-bit cells a key, the lesser counts (a count-min sketch with conservative
// update; Cormode and Muthukrishnan 2005, Estan and Varghese 2002). Keys that share both cells are admitted early,
// never late, but for ageing: when a bucket has counted four times its cells, it halves them all, so that keys seen
// once a month do not fill it. Each bucket has its own cells, guarded by the bucket's lock. Not persistent: after a
// restart or a move of the bucket, keys without a row are counted from zero.
class Admission {
 public:
  Admission(uint32_t needed, uint32_t buckets)
      : needed_(std::min(needed, 255u)),
        width_(std::max(64u, kCells / buckets)),
        cells_(new uint8_t[static_cast<size_t>(width_) * buckets]()),
        counted_(new uint32_t[buckets]()) {}

  // Count one sighting of a key without a row; true once it has been seen often enough for one.
  bool see(uint32_t bucket, uint64_t key) {
    if (++counted_[bucket] > 4 * width_) age(bucket);
    auto [a, b] = cells_of(bucket, key);
    const uint8_t least = std::min(*a, *b);
    if (least == 255) return true;
    const uint8_t next = static_cast<uint8_t>(least + 1);
    *a = std::max(*a, next);
    *b = std::max(*b, next);
    return next >= needed_;
  }
  bool admitted(uint32_t bucket, uint64_t key) const {
    const auto [a, b] = cells_of(bucket, key);
    return std::min(*a, *b) >= needed_;
  }
  size_t bytes(uint32_t buckets) const { return static_cast<size_t>(width_) * buckets; }

 private:
  static constexpr uint32_t kCells =
      1u << 22;  // 4 MiB a table: enough for a few million keys that are not admitted yet
  struct Pair {
    uint8_t *a, *b;
  };
  Pair cells_of(uint32_t bucket, uint64_t key) const {
    const uint64_t h = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9ull;
    uint8_t* base = cells_.get() + static_cast<size_t>(width_) * bucket;
    return {base + high_product(h << 1, width_), base + high_product((h ^ (h >> 31)) * 0x94d049bb133111ebull, width_)};
  }
  void age(uint32_t bucket) {
    uint8_t* base = cells_.get() + static_cast<size_t>(width_) * bucket;
    for (uint32_t i = 0; i < width_; i++) base[i] = static_cast<uint8_t>(base[i] / 2);
    counted_[bucket] = 0;
  }

  uint32_t needed_, width_;
  std::unique_ptr<uint8_t[]> cells_;
  std::unique_ptr<uint32_t[]> counted_;
};

}  // namespace freshet
