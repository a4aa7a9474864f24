// A column that a store hands over: grows at its end, is not cleared first, and takes huge pages once it is large.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

#include "freshet/simd.hpp"

namespace freshet {

// A flush of a million rows is 100 MB: in a cleared std::vector of small pages, faults and clearing took longer than
// the copying (measured: 170 ns a row, of which 40 were ours).
template <typename T>
class Column {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Column() = default;
  Column(Column&& other) noexcept { swap(other); }
  Column& operator=(Column&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Column() { release(); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

  // Append `n` elements that are not initialized.
  T* extend(size_t n) {
    if (size_ + n > capacity_) grow(size_ + n);
    T* first = data_ + size_;
    size_ += n;
    return first;
  }
  void drop_last(size_t n) { size_ -= n; }
  void push_back(const T& value) { *extend(1) = value; }
  void append(const Column& more) {
    if (more.size_) std::memcpy(extend(more.size_), more.data_, more.size_ * sizeof(T));
  }

 private:
  static constexpr size_t kLarge = 1u << 20, kHugePage = 2u << 20;

  void swap(Column& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(mapped_, other.mapped_);
  }
  void release() {
    if (mapped_)
      munmap(data_, mapped_);
    else
      std::free(data_);
  }
  void grow(size_t least) {
    const size_t bytes = std::max(least, capacity_ + capacity_ / 2) * sizeof(T);
    if (bytes < kLarge) {
      void* p = std::realloc(data_, bytes);
      if (p == nullptr) throw std::bad_alloc();
      data_ = static_cast<T*>(p);
      capacity_ = bytes / sizeof(T);
      return;
    }
    const size_t mapping = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* p = mapped_ ? mremap(data_, mapped_, mapping, MREMAP_MAYMOVE)
                      : mmap(nullptr, mapping, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, mapping, MADV_HUGEPAGE);
    if (!mapped_ && size_) std::memcpy(p, data_, size_ * sizeof(T));
    if (!mapped_) std::free(data_);
    data_ = static_cast<T*>(p);
    mapped_ = mapping;
    capacity_ = mapping / sizeof(T);
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
  size_t mapped_ = 0;  // bytes, if it has a mapping of its own
};

}  // namespace freshet
