#include "freshet/table.hpp"

#include <algorithm>
#include <cmath>
#include <new>

namespace freshet {

namespace {

constexpr double kLoad = 0.8;  // of an index; measured: above it probes of a second chunk become common
constexpr uint32_t occupied(const Chunk& chunk) { return (1u << chunk.count) - 1; }

// A number from 0 to 1, the same on every run.
double dice(uint64_t bucket, uint64_t turn) {
  uint64_t x = (bucket << 32) + turn + 1;
  for (const int shift : {33, 29, 32}) x = (x ^ (x >> shift)) * 0xbf58476d1ce4e5b9ull;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

uint32_t capacity(uint32_t chunk_count) {
  return static_cast<uint32_t>(chunk_count * static_cast<double>(Chunk::kRows) * kLoad);
}

}  // namespace

Group::Group(const std::vector<SlotSpec>& slots, bool half_last, bool serving, std::vector<uint8_t> tables_,
             uint32_t buckets, uint32_t block_rows)
    : layout(slots, half_last, serving),
      tables(std::move(tables_)),
      record_bytes_(layout.record_bytes()),
      bucket_shift_(64u - static_cast<uint32_t>(std::countr_zero(buckets))),
      block_bits_(static_cast<uint32_t>(std::countr_zero(block_rows))),
      records_(static_cast<size_t>(record_bytes_) * block_rows),
      chunks_(sizeof(Chunk)),
      bins_(buckets) {}

uint32_t Group::find(const Bin& bin, uint64_t key, uint8_t table) const {
  const uint32_t count = bin.chunk_count.load(std::memory_order_relaxed);
  if (count == 0) return kNone;
  const Chunk* chunks = bin.chunks.load(std::memory_order_relaxed);
  const uint64_t h = hash(key);
  const uint8_t tag = static_cast<uint8_t>(h);
  for (uint64_t i = home(h, count);; i = i + 1 == count ? 0 : i + 1) {
    const Chunk& chunk = chunks[i];
    for (uint32_t hits = match16(chunk.tag, tag) & occupied(chunk); hits; hits &= hits - 1) {
      const uint32_t slot = chunk.slot[std::countr_zero(hits)];
      const Header& row = header(slot);
      if (row.key == key && (row.meta & meta::kTableMask) == table) return slot;
    }
    if (chunk.overflow == 0) return kNone;
  }
}

void Group::link(Chunk* chunks, uint32_t count, uint64_t h, uint32_t slot) {
  uint64_t i = home(h, count);
  while (chunks[i].count == Chunk::kRows) {
    if (chunks[i].overflow < 255) chunks[i].overflow++;
    i = i + 1 == count ? 0 : i + 1;
  }
  Chunk& chunk = chunks[i];
  chunk.tag[chunk.count] = static_cast<uint8_t>(h);
  chunk.slot[chunk.count++] = slot;
}

void Group::resize(Bin& bin, uint32_t chunk_count) {
  const uint64_t first = chunks_.take(chunk_count);
  Chunk* fresh = reinterpret_cast<Chunk*>(chunks_.base()) + first;
  std::memset(static_cast<void*>(fresh), 0, sizeof(Chunk) * chunk_count);
  constexpr uint32_t ahead = 8;
  for (uint32_t row = 0; row < bin.rows; row++) {
    if (row + ahead < bin.rows) prefetch_read(this->row(slot_at(bin, row + ahead)).head);
    const uint32_t slot = slot_at(bin, row);
    link(fresh, chunk_count, hash(header(slot).key), slot);
  }
  const Chunk* old = bin.chunks.load(std::memory_order_relaxed);
  const uint32_t old_count = bin.chunk_count.load(std::memory_order_relaxed);
  bin.chunks.store(fresh, std::memory_order_relaxed);
  bin.chunk_count.store(chunk_count, std::memory_order_relaxed);
  bin.limit = capacity(chunk_count);
  if (old) chunks_.release(static_cast<uint64_t>(old - reinterpret_cast<Chunk*>(chunks_.base())), old_count);
}

uint32_t Group::insert(Bin& bin, uint32_t bucket, uint64_t key, uint8_t table) {
  if (bin.rows >= bin.limit) {
    // Growth by 1.3 to 1.6, differently for each bucket and time: buckets fill alike, and must not all grow in one
    // batch.
    const double factor = 1.3 + 0.3 * dice(bucket, bin.generation++);
    const uint32_t count = bin.chunk_count.load(std::memory_order_relaxed);
    resize(bin, std::max(count + 1, static_cast<uint32_t>(std::ceil(count * factor))));
  }
  if (bin.rows % block_rows() == 0) {
    if (bin.blocks.size() == bin.blocks.capacity()) bin.blocks.reserve(2 * bin.blocks.size() + 1);
    const uint64_t block = records_.take(1);
    if (block >= kNone / block_rows()) throw std::bad_alloc();
    bin.blocks.push_back(static_cast<uint32_t>(block));
  }
  const uint32_t slot = slot_at(bin, bin.rows);
  header(slot) = {key, table, 0};
  bin.rows++;
  link(bin.chunks.load(std::memory_order_relaxed), bin.chunk_count.load(std::memory_order_relaxed), hash(key), slot);
  return slot;
}

std::pair<Chunk*, uint32_t> Group::entry_of(const Bin& bin, uint32_t slot) const {
  Chunk* chunks = bin.chunks.load(std::memory_order_relaxed);
  const uint32_t count = bin.chunk_count.load(std::memory_order_relaxed);
  const uint64_t h = hash(header(slot).key);
  for (uint64_t i = home(h, count);; i = i + 1 == count ? 0 : i + 1)
    for (uint32_t hits = match16(chunks[i].tag, static_cast<uint8_t>(h)) & occupied(chunks[i]); hits;
         hits &= hits - 1) {
      const uint32_t at = static_cast<uint32_t>(std::countr_zero(hits));
      if (chunks[i].slot[at] == slot) return {&chunks[i], at};
    }
}

void Group::erase(Bin& bin, uint32_t slot) {
  Chunk* chunks = bin.chunks.load(std::memory_order_relaxed);
  const uint32_t count = bin.chunk_count.load(std::memory_order_relaxed);
  const auto [chunk, at] = entry_of(bin, slot);
  for (uint64_t i = home(hash(header(slot).key), count); &chunks[i] != chunk; i = i + 1 == count ? 0 : i + 1)
    if (chunks[i].overflow < 255) chunks[i].overflow--;
  const uint32_t last_entry = --chunk->count;
  chunk->tag[at] = chunk->tag[last_entry];
  chunk->slot[at] = chunk->slot[last_entry];

  const uint32_t last = slot_at(bin, bin.rows - 1);
  if (last != slot) {
    const auto [its_chunk, its_at] = entry_of(bin, last);
    its_chunk->slot[its_at] = slot;
    std::memcpy(row(slot).head, row(last).head, record_bytes_);
    if (served) served->move(last, slot);
  }
  bin.rows--;
  if (bin.rows % block_rows() == 0) {
    records_.release(bin.blocks.back(), 1);
    bin.blocks.pop_back();
  }
}

void Group::relist(Bin& bin) {
  for (auto& list : bin.dirty) list.clear();
  for (uint32_t row = 0; row < bin.rows; row++) {
    const uint32_t slot = slot_at(bin, row);
    for (uint32_t c = 0; c < kConsumers; c++)
      if (header(slot).meta & dirty_flag(c)) bin.dirty[c].push_back(slot);
  }
}

void Group::clear(Bin& bin) {
  for (const uint32_t block : bin.blocks) records_.release(block, 1);
  const Chunk* old = bin.chunks.load(std::memory_order_relaxed);
  if (old)
    chunks_.release(static_cast<uint64_t>(old - reinterpret_cast<Chunk*>(chunks_.base())),
                    bin.chunk_count.load(std::memory_order_relaxed));
  bin.chunk_count.store(0, std::memory_order_relaxed);
  bin.chunks.store(nullptr, std::memory_order_relaxed);
  bin.rows = bin.limit = bin.stored = bin.inexact = 0;
  bin.blocks = {};
  for (auto& list : bin.dirty) list = {};
}

void Group::shrink(Bin& bin, uint32_t bucket) {
  if (bin.rows == 0) {
    const uint32_t stored = bin.stored;
    clear(bin);
    bin.stored = stored;
    return;
  }
  if (bin.rows * 4 > bin.limit) return;
  const double spread = 1.25 + 0.5 * dice(bucket, bin.generation++);
  const uint32_t count = static_cast<uint32_t>(std::ceil(bin.rows * spread / (Chunk::kRows * kLoad)));
  resize(bin, std::max(count, 1u));
  for (auto& list : bin.dirty) list.shrink_to_fit();
  bin.blocks.shrink_to_fit();
}

size_t Group::bytes() const { return records_.bytes_in_use() / record_bytes_ * row_bytes() + chunks_.bytes_in_use(); }

}  // namespace freshet
