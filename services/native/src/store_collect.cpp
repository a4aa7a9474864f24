// What changed since the last flush or publish. Dirty lists are walked, tables are never scanned.
#include <algorithm>

#include "freshet/store.hpp"

namespace freshet {

namespace {

constexpr size_t ahead = 8;  // rows prefetched before they are copied

// Order slots by table, those of one table as they were.
void sort_by_table(const Group& group, std::vector<u32>& slots) {
  if (group.tables.size() == 1) return;
  std::array<u32, 257> next{};
  for (const u32 slot : slots) next[(group.header(slot).meta & meta::table_mask) + 1]++;
  for (size_t table = 1; table < next.size(); table++) next[table] += next[table - 1];
  std::vector<u32> sorted(slots.size());
  for (const u32 slot : slots) sorted[next[group.header(slot).meta & meta::table_mask]++] = slot;
  slots.swap(sorted);
}

}  // namespace

// Append packed rows of one bucket, table after table.
void Store::take_run(Group& group, u32 bucket, std::vector<u32>& slots, PackedColumns& out) {
  sort_by_table(group, slots);
  const u32 packed = group.layout.packed_bytes();
  i64 at = static_cast<i64>(out.keys.size());
  u64* keys = out.keys.extend(slots.size());
  u8* records = out.records.extend(slots.size() * packed);
  for (size_t i = 0; i < slots.size(); i++, at++) {
    if (i + ahead < slots.size()) group.prefetch_slot(slots[i + ahead]);
    const Header& row = group.header(slots[i]);
    keys[i] = row.key;
    group.layout.pack(group.row(slots[i]), records + i * packed);
    const i64 table = row.meta & meta::table_mask;
    if (i == 0 || out.runs.back().table != table) out.runs.push_back({bucket, table, at, at});
    out.runs.back().stop = at + 1;
  }
}

FlushBatch Store::collect_flush(const std::vector<u32>& buckets, bool whole) {
  FlushBatch out;
  for (const u32 b : buckets) check_bucket(b);
  out.buckets = buckets;
  out.groups.resize(groups_.size());
  out.removed_starts.push_back(0);
  std::vector<u32> slots;
  for (const u32 b : buckets) {
    BucketState& state = states_[b];
    const std::lock_guard lock(state.lock);
    i64 stored = 0;
    for (size_t g = 0; g < groups_.size(); g++) {
      Group& group = *groups_[g];
      Bin& bin = group.bin(b);
      pending_[flush].fetch_sub(static_cast<i64>(bin.dirty[flush].size()), std::memory_order_relaxed);
      slots.clear();
      slots.swap(bin.dirty[flush]);
      if (whole) {
        slots.clear();
        for (u32 row = 0; row < bin.rows; row++) {
          const u32 slot = group.slot_at(bin, row);
          if (changed(group.header(slot))) slots.push_back(slot);
        }
      }
      for (size_t i = 0; i < slots.size(); i++) {
        if (i + ahead < slots.size()) group.prefetch_slot(slots[i + ahead]);
        Header& row = group.header(slots[i]);
        bin.stored += !(row.meta & meta::stored);
        row.meta = (row.meta & ~meta::dirty_flush) | meta::stored;
      }
      take_run(group, b, slots, out.groups[g]);
      stored += bin.stored;
    }
    for (const Removal& gone : state.removed[flush]) {
      Group& group = *groups_[group_of(gone.table)];
      const u32 slot = group.find(group.bin(b), gone.key, gone.table);
      // Came back since: what is flushed now, or was, replaces it. A row that was only looked up is not stored.
      if (!whole && (slot == Group::none || !changed(group.header(slot)))) out.removed.push_back(gone);
    }
    state.removed[flush].clear();
    out.removed_starts.push_back(static_cast<i64>(out.removed.size()));
    out.rows.push_back(stored);
    out.clock_ms.push_back(state.clock_ms);
    for (u32 p = 0; p < spec_.partitions; p++) out.applied.push_back(applied_[static_cast<size_t>(p) * spec_.buckets + b]);
  }
  return out;
}

namespace {

// Publishing starts where it stopped last time and may pass the last bucket: rows before and after that.
struct Halves {
  std::array<std::map<u8, PublishedTable>, 2> half;  // by table
  PublishedTable& of(u32 side, u8 table, u32 width) {
    PublishedTable& out = half[side][table];
    out.table = table;
    out.width = width;
    return out;
  }
};

}  // namespace

PublishBatch Store::collect_publish(i64 max_rows) {
  const std::lock_guard publishing(publish_lock_);
  Halves halves;
  const u32 first = publish_cursor_;
  i64 left = std::max<i64>(max_rows, 0);
  for (u32 n = 0; n < spec_.buckets && left > 0; n++) {
    const u32 b = (first + n) & (spec_.buckets - 1);
    const u32 side = b < first;
    BucketState& state = states_[b];
    const std::lock_guard lock(state.lock);
    for (const auto& group : groups_) {
      Bin& bin = group->bin(b);
      std::vector<u32>& dirty = bin.dirty[publish];
      const u32 width = group->layout.width();
      const size_t take = std::min<size_t>(dirty.size(), static_cast<size_t>(left));
      for (size_t i = 0; i < take; i++) {
        if (i + ahead < take) group->prefetch_slot(dirty[dirty.size() - 1 - i - ahead]);
        const u32 slot = dirty[dirty.size() - 1 - i];
        Header& row = group->header(slot);
        row.meta &= ~meta::dirty_publish;
        PublishedTable& out = halves.of(side, static_cast<u8>(row.meta & meta::table_mask), width);
        out.keys.push_back(row.key);
        group->layout.load(group->row(slot), out.values.extend(width));
      }
      dirty.resize(dirty.size() - take);
      pending_[publish].fetch_sub(static_cast<i64>(take), std::memory_order_relaxed);
      left -= static_cast<i64>(take);
    }
    for (const Removal& gone : state.removed[publish]) {
      Group& group = *groups_[group_of(gone.table)];
      const u32 slot = group.find(group.bin(b), gone.key, gone.table);
      if (slot == Group::none || !changed(group.header(slot)))
        halves.of(side, gone.table, group.layout.width()).removed.push_back(gone.key);
    }
    state.removed[publish].clear();
    drained_.fetch_add(left > 0, std::memory_order_relaxed);
    publish_cursor_ = left > 0 ? (b + 1) & (spec_.buckets - 1) : b;
  }
  PublishBatch out;
  for (auto& [table, part] : halves.half[1]) out.tables.push_back(std::move(part));
  for (auto& [table, part] : halves.half[0]) {
    const u8 id = table;
    const auto same = std::find_if(out.tables.begin(), out.tables.end(), [id](const auto& t) { return t.table == id; });
    if (same == out.tables.end()) {
      out.tables.push_back(std::move(part));
      continue;
    }
    same->keys.append(part.keys);
    same->values.append(part.values);
    same->removed.append(part.removed);
  }
  out.clock_ms = clock_ms_.load(std::memory_order_relaxed);
  out.pending = pending(publish);
  return out;
}

}  // namespace freshet
