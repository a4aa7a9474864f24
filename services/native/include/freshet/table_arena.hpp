// Memory of a table: one reserved address range, committed as it fills, in huge pages.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

// Thrown with the lack and the remedy.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(const std::string& what);
  const char* what() const noexcept override { return what_->c_str(); }

 private:
  std::shared_ptr<const std::string> what_;  // shared: exceptions are copied without throwing
};

// Pieces handed out of one reserved range. Addresses stay mapped, readable and writable, until the arena dies; a freed
// piece reads as zeros or its old bytes, and a page that no piece in use touches any more goes back to the system.
// Thread-safe.
//
// A page is cleared when it is first touched: a huge one takes 0.1 ms, and 5 ms where a hypervisor has to find the
// memory first, longer than a batch. So a thread touches pages ahead of the pieces that are handed out; a batch comes
// upon an untouched page only when pieces are taken faster than memory can be had.
class Arena {
 public:
  explicit Arena(size_t piece);  // every piece starts at a multiple of `piece` bytes
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* base() const { return base_; }
  // `n` pieces in a row; returns the number of the first. Throws NoMemory at the end of the range or of memory.
  uint64_t take(uint64_t n);
  void release(uint64_t first, uint64_t n);
  size_t bytes_in_use() const;
  size_t bytes_reserved() const { return reserved_; }
  // Whether the address is, or was, in use. Takes no lock, for prefetching.
  bool holds(const void* p) const {
    const uint8_t* at = static_cast<const uint8_t*>(p);
    return at >= base_ && at < base_ + committed_.load(std::memory_order_relaxed);
  }

 private:
  static uint32_t size_class(uint64_t n);
  static constexpr size_t kStop = ~size_t{0};
  void commit(size_t bytes);
  // Pages that `n` pieces in a row touch: first and one behind the last.
  std::pair<size_t, size_t> pages(uint64_t first, uint64_t n) const {
    return {first * piece_ / page_, ((first + n) * piece_ + page_ - 1) / page_};
  }
  void hold(uint64_t first, uint64_t n);
  void release_pages(uint64_t first, uint64_t n);
  void ask_ahead();
  void touch_ahead();

  size_t piece_, page_;
  uint8_t* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* base_ = nullptr;
  size_t reserved_ = 0;
  std::atomic<size_t> committed_{0};
  uint64_t end_ = 0, in_use_ = 0;  // pieces
  std::vector<uint16_t> users_;    // of each page: runs in use that touch it
  mutable std::mutex mutex_;
  struct Freed {
    uint64_t first, n;
  };
  std::vector<Freed> freed_[48];  // by size class

  std::atomic<size_t> used_{0};    // bytes up to the end
  std::atomic<size_t> wanted_{0};  // bytes that shall have been touched; whole huge pages, `stop` at the end
  std::thread toucher_;            // runs once there is something to touch ahead
};

}  // namespace freshet
