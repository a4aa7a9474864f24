// Memory of a table: one reserved address range, made usable as it fills, asked for in huge pages.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

// Pieces handed out of one reserved range. Addresses stay mapped, readable and writable, until the arena dies; a freed
// piece gives its whole pages back to the system and reads as zeros or its old bytes. Thread-safe.
class Arena {
 public:
  explicit Arena(size_t piece);  // every piece starts at a multiple of `piece` bytes
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  u8* base() const { return base_; }
  // `n` pieces in a row; returns the number of the first. Throws std::bad_alloc at the end of the range or of memory.
  u64 take(u64 n);
  void give_back(u64 first, u64 n);
  size_t bytes_in_use() const;
  // Whether the address is handed out or was; asked without a lock, for prefetching.
  bool holds(const void* p) const {
    const u8* at = static_cast<const u8*>(p);
    return at >= base_ && at < base_ + committed_.load(std::memory_order_relaxed);
  }

 private:
  static u32 size_class(u64 n);
  void commit(size_t bytes);

  size_t piece_;
  u8* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  u8* base_ = nullptr;
  size_t reserved_ = 0;
  std::atomic<size_t> committed_{0};
  u64 end_ = 0, in_use_ = 0;  // pieces
  mutable std::mutex mutex_;
  struct Freed {
    u64 first, n;
  };
  std::vector<Freed> freed_[48];  // by size class
};

}  // namespace freshet
