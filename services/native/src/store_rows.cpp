// Rows by key, in any order: recovery, read-through, deltas of serving tables, removal.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "store_cold.hpp"

namespace freshet {

// Calls visit(bucket, begin, end) for each run of keys of one bucket, its lock held and their rows in memory; those of
// a serving store may be on disk.
template <typename Visit>
void Store::each_bucket_run(uint8_t table, const uint64_t* keys, size_t n, Visit visit) {
  if (!spec_.serving) fetch_keys(table, keys, n);
  if (cold_ && spec_.serving) wait_for_room();
  for (size_t i = 0; i < n;) {
    const uint32_t bucket = bucket_of(keys[i]);
    size_t end = i + 1;
    while (end < n && bucket_of(keys[end]) == bucket) end++;
    const std::unique_lock lock =
        spec_.serving ? std::unique_lock(states_[bucket].lock) : lock_fetched(bucket, table, keys + i, end - i);
    visit(bucket, i, end);
    i = end;
  }
}

// Under the bucket's lock; the record has been checked.
void Store::import_row(Group& group, uint32_t bucket, uint64_t key, uint8_t table, const uint8_t* record) {
  Bin& bin = group.bin(bucket);
  uint32_t slot = group.find(bin, key, table);
  if (slot == Group::kNone) {
    slot = group.insert(bin, bucket, key, table);
    rows_[table].fetch_add(1, std::memory_order_relaxed);
  }
  Header& row = group.header(slot);
  const uint32_t flags = row.meta & ~meta::kPackedMask;
  group.layout.unpack(group.row(slot), record);
  row.meta |= (flags & ~meta::kOnDisk) | meta::kStored;
  bin.stored += !(flags & meta::kStored);
  set_inexact(bin, row);
}

void Store::import_rows(uint8_t table, const uint64_t* keys, const uint8_t* records, size_t n, size_t record_bytes) {
  Group& group = *groups_[group_of(table)];
  const uint32_t packed = group.layout.packed_bytes();
  if (spec_.serving) throw std::invalid_argument("a serving store takes values, not packed rows: use import_values");
  if (record_bytes != packed)
    throw std::invalid_argument("expected packed rows of " + std::to_string(packed) + " bytes, found " +
                                std::to_string(record_bytes));
  for (size_t i = 0; i < n; i++) {
    const char* fault =
        keys[i] == 0 ? "its key is 0, which no row has" : group.layout.packed_fault(records + i * packed, table);
    if (fault)
      throw std::invalid_argument("row " + std::to_string(i) + " of table " + std::to_string(table) + ", key " +
                                  std::to_string(keys[i]) + ": " + fault);
  }
  each_bucket_run(table, keys, n, [&](uint32_t bucket, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) import_row(group, bucket, keys[i], table, records + i * packed);
  });
}

void Store::export_rows(uint8_t table, const uint64_t* keys, size_t n, uint8_t* records, uint8_t* found) {
  const Group& group = *groups_[group_of(table)];
  const uint32_t packed = group.layout.packed_bytes();
  each_bucket_run(table, keys, n, [&](uint32_t bucket, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      const uint32_t slot = group.find(group.bin(bucket), keys[i], table);
      found[i] = slot != Group::kNone;
      if (found[i])
        group.layout.pack(group.row(slot), records + i * packed);
      else
        std::fill_n(records + i * packed, packed, uint8_t{0});
    }
  });
}

void Store::import_values(uint8_t table, const uint64_t* keys, const float* values, size_t n, int64_t clock_ms,
                          const uint32_t* touched) {
  Group& group = *groups_[group_of(table)];
  if (!spec_.serving)
    throw std::invalid_argument("only a serving store takes values; a training one needs packed rows");
  if (std::find(keys, keys + n, uint64_t{0}) != keys + n)
    throw std::invalid_argument("key 0 has no row: it stands for null");
  const uint32_t width = group.layout.width();
  const uint32_t now = seconds(clock_ms);
  each_bucket_run(table, keys, n, [&](uint32_t bucket, size_t begin, size_t end) {
    Bin& bin = group.bin(bucket);
    for (size_t i = begin; i < end; i++) {
      uint32_t slot = group.find(bin, keys[i], table);
      if (slot == Group::kNone) {
        const bool on_disk = leaves_disk(group, bucket, {keys[i], table});
        slot = group.insert(bin, bucket, keys[i], table);
        if (!on_disk) rows_[table].fetch_add(1, std::memory_order_relaxed);
      }
      group.layout.store(group.row(slot), values + i * width);
      Header& row = group.header(slot);
      row.meta &= ~meta::kOnDisk;
      touch(row, touched ? touched[i] : now);
    }
  });
  int64_t clock = clock_ms_.load(std::memory_order_relaxed);
  while (clock < clock_ms && !clock_ms_.compare_exchange_weak(clock, clock_ms, std::memory_order_relaxed)) {
  }
}

// Under the bucket's lock, of a serving store and a row that is not in memory: whether it may be on disk. Its record
// there counts no more.
bool Store::leaves_disk(Group& group, uint32_t bucket, RowId id) {
  if (!group.cold || !group.cold->may_hold(group.cold->bin(bucket), id)) return false;
  group.cold->bin(bucket).rows[table_index(group, id.table)]--;
  return true;
}

// Whether a consumer has been given the row, or is going to be.
bool Store::changed(const Header& row) const {
  return (row.meta & (meta::kStored | meta::kDirtyPublish | meta::kDirtyFlush)) || row.meta >> meta::kCountShift;
}

// Remove a row and leave tombstones for the consumers that may have it. Sets `relist` if dirty lists name moved or
// removed rows.
void Store::forget(Group& group, uint32_t bucket, uint32_t slot, bool& relist) {
  Bin& bin = group.bin(bucket);
  const Header row = group.header(slot);
  const uint8_t table = static_cast<uint8_t>(row.meta & meta::kTableMask);
  const Header last = group.header(group.slot_at(bin, bin.rows - 1));
  relist = relist || ((row.meta | last.meta) & (meta::kDirtyPublish | meta::kDirtyFlush));
  for (uint32_t c = 0; c < kConsumers; c++) {
    if (row.meta & dirty_flag(c)) pending_[c].fetch_sub(1, std::memory_order_relaxed);
    if (spec_.consumed[c] && changed(row)) states_[bucket].removed[c].push_back({row.key, table});
  }
  bin.stored -= (row.meta & meta::kStored) != 0;
  if (group.cold && group.cold->may_hold(group.cold->bin(bucket), {row.key, table}))
    group.cold->erase(group.cold->bin(bucket), {row.key, table});
  clear_inexact(bin, group.header(slot));
  group.erase(bin, slot);
  rows_[table].fetch_sub(1, std::memory_order_relaxed);
}

int64_t Store::remove(uint8_t table, const uint64_t* keys, size_t n) {
  Group& group = *groups_[group_of(table)];
  int64_t removed = 0;
  each_bucket_run(table, keys, n, [&](uint32_t bucket, size_t begin, size_t end) {
    bool relist = false;
    Bin& bin = group.bin(bucket);
    for (size_t i = begin; i < end; i++) {
      const uint32_t slot = group.find(bin, keys[i], table);
      if (slot == Group::kNone) {
        // It may be on disk; whether it counted shows when the pages are merged.
        if (spec_.serving && group.cold && group.cold->may_hold(group.cold->bin(bucket), {keys[i], table}))
          group.cold->erase(group.cold->bin(bucket), {keys[i], table});
        continue;
      }
      forget(group, bucket, slot, relist);
      if (auto& loading = states_[bucket].loading)
        loading->absent.insert({keys[i], table});  // whatever is read of it later
      removed++;
    }
    if (relist) group.relist(bin);
    group.shrink(bin, bucket);
  });
  return removed;
}

// Here and not with the collectors because it walks keys in any order.
void Store::put_back_published(uint8_t table, const uint64_t* keys, size_t n, const uint64_t* removed,
                               size_t n_removed) {
  Group& group = *groups_[group_of(table)];
  int64_t listed = 0;
  each_bucket_run(table, keys, n, [&](uint32_t bucket, size_t begin, size_t end) {
    Bin& bin = group.bin(bucket);
    for (size_t i = begin; i < end; i++) {
      const uint32_t slot = group.find(bin, keys[i], table);
      if (slot == Group::kNone) continue;
      group.header(slot).meta &= ~meta::kServed;
      listed += mark(bin, group.header(slot), slot, publish);
    }
  });
  each_bucket_run(table, removed, n_removed, [&](uint32_t bucket, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) states_[bucket].removed[publish].push_back({removed[i], table});
  });
  pending_[publish].fetch_add(listed, std::memory_order_relaxed);
}

}  // namespace freshet
