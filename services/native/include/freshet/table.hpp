// A store group: tables of equal layout in one set of buckets. Exact: a row is (table id, 64-bit key).
//
// Each bucket has an index of 64-byte chunks and rows in blocks of 64. Growth rebuilds the index and never moves a row;
// removal fills the hole with the bucket's last row and frees a block when it is empty. Nothing here locks: the
// caller holds the bucket's lock (see store.hpp).
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "freshet/optim.hpp"
#include "freshet/table_arena.hpp"
#include "freshet/table_cold.hpp"
#include "freshet/table_served.hpp"

namespace freshet {

struct alignas(64) Chunk {
  static constexpr uint32_t kRows = 12;
  uint8_t tag[kRows];
  uint8_t count;
  uint8_t
      overflow;  // rows whose home is this chunk or an earlier one and that lie beyond it; 255 never goes down again
  uint16_t unused;
  uint32_t slot[kRows];
};
static_assert(sizeof(Chunk) == 64);

enum Consumer : uint32_t { publish = 0, flush = 1 };
constexpr uint32_t kConsumers = 2;

constexpr uint32_t dirty_flag(uint32_t consumer) {
  return consumer == publish ? meta::kDirtyPublish : meta::kDirtyFlush;
}

// One bucket's part of a group.
struct Bin {
  std::atomic<Chunk*> chunks{nullptr};  // atomics only for prefetching without the lock, which may read stale values
  std::atomic<uint32_t> chunk_count{0};
  uint32_t rows = 0;
  uint32_t limit = 0;    // rows at which the index grows
  uint32_t stored = 0;   // rows that the row store will hold after the next flush
  uint32_t inexact = 0;  // rows with the flag `kInexact`
  uint32_t generation = 0;
  std::vector<uint32_t> blocks;
  std::vector<uint32_t> dirty[kConsumers];  // slots of rows changed since the consumer last took them, each once
};

class Group {
 public:
  static constexpr uint32_t kBlockRows = 64, kFewRows = 8;  // of a block; few where most rows are on disk
  static constexpr uint32_t kNone = 0xffffffffu;

  // block_rows: rows for which memory is taken at a time; a power of two.
  Group(const std::vector<SlotSpec>& slots, bool half_last, bool serving, std::vector<uint8_t> tables, uint32_t buckets,
        uint32_t block_rows = kBlockRows);

  const RowLayout layout;
  const std::vector<uint8_t> tables;

  Row row(uint32_t slot) const { return layout.row(records_.base() + static_cast<size_t>(slot) * record_bytes_); }
  Header& header(uint32_t slot) const { return row(slot).header(); }
  Bin& bin(uint32_t bucket) { return bins_[bucket]; }
  const Bin& bin(uint32_t bucket) const { return bins_[bucket]; }
  void prefetch_bin(uint32_t bucket) const {
    prefetch_read(&bins_[bucket]);  // seldom written: lanes may share it
    prefetch_write(&bins_[bucket].dirty);
  }
  uint32_t slot_at(const Bin& bin, uint32_t row) const {
    return (bin.blocks[row >> block_bits_] << block_bits_) + (row & (block_rows() - 1));
  }

  uint32_t find(const Bin& bin, uint64_t key, uint8_t table) const;
  // Add a row that is absent. Its header is set, with no flags; the rest of the record is the caller's to fill.
  uint32_t insert(Bin& bin, uint32_t bucket, uint64_t key, uint8_t table);
  // Remove a row. The bucket's last row takes its slot; `relist` then mends the dirty lists.
  void erase(Bin& bin, uint32_t slot);
  void relist(Bin& bin);
  void clear(Bin& bin);
  // Release index memory after many removals.
  void shrink(Bin& bin, uint32_t bucket);

  // Keep what serving holds of the rows; called before there are any.
  void keep_served(int bits, uint32_t scalars) {
    served = std::make_unique<ServedRows>(bits, scalars, layout.width(), records_.bytes_reserved() / record_bytes_);
  }
  std::unique_ptr<ServedRows> served;  // null: not kept
  std::unique_ptr<ColdRows> cold;      // null: all rows are in memory
  uint32_t row_bytes() const { return record_bytes_ + (served ? served->row_bytes() : 0); }

  // Hints for a key of any bucket, without its lock: the chunk where its search starts (nullptr: no index yet), and the
  // slot that the chunk seems to name (none: no such tag). Either may be out of date; both are good for prefetching
  // only.
  const Chunk* chunk_hint(uint64_t key) const {
    const Bin& bin = bins_[key >> bucket_shift_];
    const Chunk* chunks = bin.chunks.load(std::memory_order_relaxed);
    if (chunks == nullptr) return nullptr;
    const Chunk* chunk = chunks + home(hash(key), bin.chunk_count.load(std::memory_order_relaxed));
    // The pair may belong to two indexes if the bucket has just grown; stay inside the range that is mapped.
    return chunks_.holds(chunk) ? chunk : nullptr;
  }
  // The chunk is read without its bucket's lock: the memory is mapped for the arena's life, so a torn or stale value
  // costs a cache line and harms nothing.
  __attribute__((no_sanitize("thread"))) static uint32_t slot_hint(const Chunk* chunk, uint64_t key) {
    if (chunk == nullptr) return kNone;
    const uint32_t hits = match16(chunk->tag, static_cast<uint8_t>(hash(key))) & ((1u << Chunk::kRows) - 1);
    return hits ? chunk->slot[std::countr_zero(hits)] : kNone;
  }
  void prefetch_slot(uint32_t slot) const {
    const uint8_t* record = row(slot).head;
    const uint8_t* end = record + std::min(record_bytes_, 256u);
    for (const uint8_t* line = record - reinterpret_cast<uintptr_t>(record) % 64; line < end; line += 64)
      prefetch_far(line);
  }

  size_t bytes() const;

 private:
  static uint64_t hash(uint64_t key) {
    const uint64_t h = key * 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 32);
  }
  static uint64_t home(uint64_t hash, uint64_t chunks) { return high_product(hash * 0x9e3779b97f4a7c15ull, chunks); }
  static void link(Chunk* chunks, uint32_t count, uint64_t h, uint32_t slot);
  void resize(Bin& bin, uint32_t chunk_count);
  std::pair<Chunk*, uint32_t> entry_of(const Bin& bin, uint32_t slot) const;

  uint32_t block_rows() const { return 1u << block_bits_; }

  uint32_t record_bytes_;
  uint32_t bucket_shift_;  // of a key
  uint32_t block_bits_;
  Arena records_;  // pieces: blocks
  Arena chunks_;   // pieces: chunks
  std::vector<Bin> bins_;
};

}  // namespace freshet
