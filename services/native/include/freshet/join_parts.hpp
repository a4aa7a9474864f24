// Containers of the joiner's state: a pool with stable indices, a map from 128-bit keys, a queue by time, an arena.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace freshet::join {

inline constexpr uint32_t kNone = 0xFFFF'FFFFu;

// A 128-bit hash of an identity: of an impression, or of an event.
struct Key {
  uint64_t hi;
  uint64_t lo;
  bool operator==(const Key&) const = default;
};

// Objects at stable 32-bit indices, in blocks that never move (growing copies nothing); freed indices are used again.
template <typename T>
class Pool {
 public:
  uint32_t take() {
    if (!free_.empty()) {
      const uint32_t index = free_.back();
      free_.pop_back();
      (*this)[index] = T{};
      return index;
    }
    if (used_ == blocks_.size() * kBlock) blocks_.push_back(std::make_unique<T[]>(kBlock));
    return static_cast<uint32_t>(used_++);
  }
  void release(uint32_t index) { free_.push_back(index); }
  T& operator[](uint32_t index) { return blocks_[index / kBlock][index % kBlock]; }
  const T& operator[](uint32_t index) const { return blocks_[index / kBlock][index % kBlock]; }
  size_t size() const { return used_ - free_.size(); }

 private:
  static constexpr size_t kBlock = 4096;
  std::vector<std::unique_ptr<T[]>> blocks_;
  std::vector<uint32_t> free_;
  size_t used_ = 0;
};

// Open addressing with linear probing from a key to the index of a pooled object that has a member `key`.
// A cell holds 32 bits of the key, so that a probe rarely reads the object.
template <typename T>
class KeyMap {
 public:
  explicit KeyMap(const Pool<T>& pool) : pool_(pool), cells_(kSmallest) {}

  uint32_t find(const Key& key) const {
    for (size_t at = home(key);; at = next(at)) {
      const Cell& cell = cells_[at];
      if (cell.index == kNone) return kNone;
      if (cell.tag == tag(key) && pool_[cell.index].key == key) return cell.index;
    }
  }
  // The key must be absent.
  void insert(const Key& key, uint32_t index) {
    if ((size_ + 1) * 5 > cells_.size() * 3) grow();
    place(key, index);
    ++size_;
  }
  // The key must be present. Later cells of the run move up, so that no tombstones accumulate.
  void erase(const Key& key) {
    size_t hole = home(key);
    while (!(cells_[hole].tag == tag(key) && pool_[cells_[hole].index].key == key)) hole = next(hole);
    for (size_t at = next(hole); cells_[at].index != kNone; at = next(at)) {
      const size_t wants = home(pool_[cells_[at].index].key);
      if (((at - wants) & mask()) >= ((at - hole) & mask())) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = Cell{};
    --size_;
  }
  size_t size() const { return size_; }

 private:
  struct Cell {
    uint32_t tag = 0;
    uint32_t index = kNone;
  };
  static constexpr size_t kSmallest = 1024;

  size_t mask() const { return cells_.size() - 1; }
  size_t next(size_t at) const { return (at + 1) & mask(); }
  size_t home(const Key& key) const { return (key.lo * 0x9E37'79B9'7F4A'7C15ull >> 20) & mask(); }
  static uint32_t tag(const Key& key) { return static_cast<uint32_t>(key.hi); }
  void place(const Key& key, uint32_t index) {
    size_t at = home(key);
    while (cells_[at].index != kNone) at = next(at);
    cells_[at] = Cell{tag(key), index};
  }
  void grow() {
    std::vector<Cell> old(cells_.size() * 2);
    old.swap(cells_);
    for (const Cell& cell : old)
      if (cell.index != kNone) place(pool_[cell.index].key, cell.index);
  }

  const Pool<T>& pool_;
  std::vector<Cell> cells_;
  size_t size_ = 0;
};

// Items by their due time, in slots of 1,024 ms. Times arrive nearly in order, so a slot is filled by appending; only
// the slot of the watermark is ever sorted.
class TimeQueue {
 public:
  void push(int64_t time, uint32_t item) {
    const int64_t at = time >> kSlotBits;
    if (last_ == nullptr || at != last_at_) {
      last_ = &slots_[at];
      last_at_ = at;
    }
    last_->sorted = false;
    last_->items.push_back({time, item});
    ++size_;
  }
  // Calls take(item) for every item with time <= until; within a slot the order is undefined. `take` must not push
  // here.
  template <typename Take>
  void pop(int64_t until, Take&& take) {
    while (!slots_.empty()) {
      const auto first = slots_.begin();
      if (first->first > until >> kSlotBits) return;
      std::vector<Item>& items = first->second.items;
      if (first->first == until >> kSlotBits) {
        if (!first->second.sorted) {
          std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.time > b.time; });
          first->second.sorted = true;
        }
        while (!items.empty() && items.back().time <= until) {
          take(items.back().item);
          items.pop_back();
          --size_;
        }
        if (!items.empty()) return;
      } else {
        for (const Item& item : items) take(item.item);
        size_ -= items.size();
      }
      last_ = nullptr;
      slots_.erase(first);
    }
  }
  bool due(int64_t until) const {
    if (slots_.empty()) return false;
    const auto first = slots_.begin();
    if (first->first != until >> kSlotBits) return first->first < until >> kSlotBits;
    return std::any_of(first->second.items.begin(), first->second.items.end(),
                       [until](const Item& item) { return item.time <= until; });
  }
  size_t size() const { return size_; }

 private:
  static constexpr int kSlotBits = 10;
  struct Item {
    int64_t time;
    uint32_t item;
  };
  struct Slot {
    std::vector<Item> items;
    bool sorted = false;
  };
  std::map<int64_t, Slot> slots_;
  Slot* last_ = nullptr;  // of the last push; the next one mostly goes to the same
  int64_t last_at_ = 0;
  size_t size_ = 0;
};

// Offsets of a topic that a restart must read again, each until its expiry. Pushed in offset order.
class Retained {
 public:
  void push(int64_t offset, int64_t expiry) { records_.push_back({offset, expiry}); }
  // The smallest offset that is needed at this watermark, or `next` if none is.
  int64_t low(int64_t watermark, int64_t next) {
    while (!records_.empty() && records_.front().expiry <= watermark) records_.pop_front();
    return records_.empty() ? next : records_.front().offset;
  }
  // Restores the order after records of earlier offsets were pushed.
  void sort() {
    std::sort(records_.begin(), records_.end(), [](const Record& a, const Record& b) { return a.offset < b.offset; });
  }
  size_t size() const { return records_.size(); }

 private:
  struct Record {
    int64_t offset;
    int64_t expiry;
  };
  std::deque<Record> records_;
};

// Bytes of events, appended to chunks; a chunk is freed when nothing in it is needed. Events are decided nearly in the
// order in which they came, so chunks empty nearly in order too.
class Arena {
 public:
  struct Place {
    uint32_t chunk;
    uint32_t at;
  };
  Place put(const uint8_t* data, size_t size) {
    if (current_ == kNone || chunks_[current_].used + size > chunks_[current_].size) open(size);
    Chunk& chunk = chunks_[current_];
    const Place place{current_, static_cast<uint32_t>(chunk.used)};
    if (size != 0) std::memcpy(chunk.data.get() + chunk.used, data, size);
    chunk.used += size;
    ++chunk.live;
    return place;
  }
  const uint8_t* at(Place place) const { return chunks_[place.chunk].data.get() + place.at; }
  void free(Place place) {
    Chunk& chunk = chunks_[place.chunk];
    if (--chunk.live == 0 && place.chunk != current_) close(place.chunk);
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kChunk = 256 * 1024;
  struct Chunk {
    std::unique_ptr<uint8_t[]> data;
    size_t size = 0;
    size_t used = 0;
    size_t live = 0;
  };
  void open(size_t least) {
    if (current_ != kNone && chunks_[current_].live == 0) close(current_);
    const size_t size = std::max(least, kChunk);
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(chunks_.size()));
      chunks_.emplace_back();
    }
    current_ = free_.back();
    free_.pop_back();
    chunks_[current_] = Chunk{std::unique_ptr<uint8_t[]>(new uint8_t[size]), size, 0, 0};
    bytes_ += size;
  }
  void close(uint32_t index) {
    bytes_ -= chunks_[index].size;
    chunks_[index] = Chunk{};
    free_.push_back(index);
  }
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_;
  uint32_t current_ = kNone;
  size_t bytes_ = 0;
};

}  // namespace freshet::join
