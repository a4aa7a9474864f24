// A store group: tables of equal layout in one set of buckets. Exact: a row is (table id, 64-bit key).
//
// Each bucket has an index of 64-byte chunks and rows in blocks of 64. Growth rebuilds the index and never moves a row;
// removal fills the hole with the bucket's last row and frees a block when it is empty. Nothing here locks: whoever
// calls holds the bucket's lock (see store.hpp).
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "freshet/optim.hpp"
#include "freshet/table_arena.hpp"

namespace freshet {

struct alignas(64) Chunk {
  static constexpr u32 rows = 12;
  u8 tag[rows];
  u8 count;
  u8 overflow;  // rows whose home is this chunk or an earlier one and that lie beyond it; 255 never goes down again
  u16 unused;
  u32 slot[rows];
};
static_assert(sizeof(Chunk) == 64);

enum Consumer : u32 { publish = 0, flush = 1 };
constexpr u32 consumers = 2;

constexpr u32 dirty_flag(u32 consumer) { return consumer == publish ? meta::dirty_publish : meta::dirty_flush; }

// One bucket's part of a group.
struct Bin {
  std::atomic<Chunk*> chunks{nullptr};  // atomics only for prefetching without the lock, which may read stale values
  std::atomic<u32> chunk_count{0};
  u32 rows = 0;
  u32 limit = 0;  // rows at which the index grows
  u32 stored = 0;  // rows that the row store will hold after the next flush
  u32 generation = 0;
  std::vector<u32> blocks;
  std::vector<u32> dirty[consumers];  // slots of rows changed since the consumer last took them, each once
};

class Group {
 public:
  static constexpr u32 block_rows = 64;
  static constexpr u32 none = 0xffffffffu;

  Group(const std::vector<SlotSpec>& slots, bool half_last, bool serving, std::vector<u8> tables, u32 buckets);

  const RowLayout layout;
  const std::vector<u8> tables;

  Row row(u32 slot) const { return layout.row(records_.base() + static_cast<size_t>(slot) * record_bytes_); }
  Header& header(u32 slot) const { return row(slot).header(); }
  Bin& bin(u32 bucket) { return bins_[bucket]; }
  const Bin& bin(u32 bucket) const { return bins_[bucket]; }
  void prefetch_bin(u32 bucket) const {
    prefetch_read(&bins_[bucket]);  // seldom written: lanes may share it
    prefetch_write(&bins_[bucket].dirty);
  }
  u32 slot_at(const Bin& bin, u32 row) const { return bin.blocks[row / block_rows] * block_rows + row % block_rows; }

  u32 find(const Bin& bin, u64 key, u8 table) const;
  // Add a row that is absent. Its header is set, with no flags; the rest of the record is the caller's to fill.
  u32 insert(Bin& bin, u32 bucket, u64 key, u8 table);
  // Remove a row. The bucket's last row takes its slot; `relist` then mends the dirty lists.
  void erase(Bin& bin, u32 slot);
  void relist(Bin& bin);
  void clear(Bin& bin);
  // Give back index memory after many removals.
  void shrink(Bin& bin, u32 bucket);

  // Hints for a key of any bucket, without its lock: the chunk where its search starts (nullptr: no index yet), and the
  // slot that the chunk seems to name (none: no such tag). Either may be out of date; both are good for prefetching only.
  const Chunk* chunk_hint(u64 key) const {
    const Bin& bin = bins_[key >> bucket_shift_];
    const Chunk* chunks = bin.chunks.load(std::memory_order_relaxed);
    if (chunks == nullptr) return nullptr;
    const Chunk* chunk = chunks + home(hash(key), bin.chunk_count.load(std::memory_order_relaxed));
    // The pair may belong to two indexes if the bucket has just grown; stay inside the range that is mapped.
    return chunks_.holds(chunk) ? chunk : nullptr;
  }
  // The chunk is read without its bucket's lock: the memory is mapped for the arena's life, so a torn or stale value costs a
  // cache line and harms nothing.
  __attribute__((no_sanitize("thread"))) static u32 slot_hint(const Chunk* chunk, u64 key) {
    if (chunk == nullptr) return none;
    const u32 hits = match16(chunk->tag, static_cast<u8>(hash(key))) & ((1u << Chunk::rows) - 1);
    return hits ? chunk->slot[std::countr_zero(hits)] : none;
  }
  void prefetch_slot(u32 slot) const {
    const u8* record = row(slot).head;
    const u8* end = record + std::min(record_bytes_, 256u);
    for (const u8* line = record - reinterpret_cast<std::uintptr_t>(record) % 64; line < end; line += 64) prefetch_far(line);
  }

  size_t bytes() const;

 private:
  static u64 hash(u64 key) {
    const u64 h = key * 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 32);
  }
  static u64 home(u64 hash, u64 chunks) { return high_product(hash * 0x9e3779b97f4a7c15ull, chunks); }
  static void link(Chunk* chunks, u32 count, u64 h, u32 slot);
  void resize(Bin& bin, u32 chunk_count);
  std::pair<Chunk*, u32> entry_of(const Bin& bin, u32 slot) const;

  u32 record_bytes_;
  u32 bucket_shift_;  // of a key
  Arena records_;     // pieces: blocks
  Arena chunks_;      // pieces: chunks
  std::vector<Bin> bins_;
};

}  // namespace freshet
