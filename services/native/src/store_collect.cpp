// What changed since the last flush or publish. Dirty lists are walked, tables are never scanned.
#include <algorithm>
#include <functional>
#include <stdexcept>

#include "freshet/store.hpp"

namespace freshet {

namespace {

constexpr size_t kAhead = 8;  // rows prefetched before they are copied

}  // namespace

// Copies the changed rows and removed keys of one bucket after another out as runs, sorted.
class Store::Taker {
 public:
  Taker(Store& store, RunColumns& out) : store_(store), widths_(store.packed_widths()), out_(out) {}

  // Under the bucket's lock. Returns the rows that the row store holds once this is written.
  int64_t take(uint32_t bucket, bool whole) {
    rows_.clear();
    parts_.clear();
    int64_t stored = 0;
    for (uint32_t g = 0; g < store_.groups_.size(); g++) {
      if (store_.cold_) store_.groups_[g]->cold->bin(bucket).epoch++;
      list(g, bucket, whole);
      stored += store_.groups_[g]->bin(bucket).stored;
    }
    std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.table < b.table; });
    list_removed(bucket, whole);
    unsealed_ = out_.directory.size();
    size_t gone = 0;
    for (const Part& part : parts_) {
      while (gone < removed_.size() && removed_[gone].table < part.table) gone = write(bucket, nullptr, gone);
      gone = write(bucket, &part, gone);
    }
    while (gone < removed_.size()) gone = write(bucket, nullptr, gone);
    return stored;
  }

  // Without the lock: checksums of the last rows, while they are still in cache.
  void seal_last() {
    for (size_t i = unsealed_; i < out_.directory.size(); i++) {
      RunEntry& run = out_.directory.data()[i];
      seal(run, out_.body.data() + run.at, widths_[run.table]);
    }
  }

 private:
  struct Part {
    uint32_t table, group, begin, end;  // of rows_
  };

  // The group's changed rows, table by table, rising. They count as clean and stored from now on.
  void list(uint32_t g, uint32_t bucket, bool whole) {
    Group& group = *store_.groups_[g];
    Bin& bin = group.bin(bucket);
    store_.pending_[flush].fetch_sub(static_cast<int64_t>(bin.dirty[flush].size()), std::memory_order_relaxed);
    slots_.clear();
    slots_.swap(bin.dirty[flush]);
    if (whole) {
      slots_.clear();
      for (uint32_t row = 0; row < bin.rows; row++) {
        const uint32_t slot = group.slot_at(bin, row);
        if (store_.changed(group.header(slot))) slots_.push_back(slot);
      }
    }
    const uint32_t first = static_cast<uint32_t>(rows_.size());
    std::array<uint32_t, 257> next{};
    for (size_t i = 0; i < slots_.size(); i++) {
      if (i + kAhead < slots_.size()) group.prefetch_slot(slots_[i + kAhead]);
      Header& row = group.header(slots_[i]);
      bin.stored += !(row.meta & meta::kStored);
      row.meta = (row.meta & ~meta::kDirtyFlush) | meta::kStored;
      const uint32_t table = row.meta & meta::kTableMask;
      next[table + 1]++;
      rows_.push_back({row.key, table, slots_[i]});
    }
    if (group.tables.size() > 1) {
      for (size_t table = 1; table < next.size(); table++) next[table] += next[table - 1];
      scratch_.assign(rows_.begin() + first, rows_.end());
      for (const KeyAt& row : scratch_) rows_[first + next[row.source]++] = row;
    }
    for (uint32_t begin = first, end; begin < rows_.size(); begin = end) {
      const uint32_t table = rows_[begin].source;
      for (end = begin + 1; end < rows_.size() && rows_[end].source == table;) end++;
      sort_keys(rows_.data() + begin, end - begin, scratch_);
      parts_.push_back({table, g, begin, end});
    }
  }

  void list_removed(uint32_t bucket, bool whole) {
    removed_.clear();
    std::vector<Removal>& all = store_.states_[bucket].removed[flush];
    for (const Removal& gone : all) {
      Group& group = *store_.groups_[store_.group_of(gone.table)];
      const uint32_t slot = group.find(group.bin(bucket), gone.key, gone.table);
      // It exists again: its flush, now or before, replaces the tombstone. A row that was only looked up is not stored.
      if (!whole && (slot == Group::kNone || !store_.changed(group.header(slot)))) removed_.push_back(gone);
    }
    all.clear();
    const auto place = [](const Removal& gone) { return std::pair(gone.table, gone.key); };
    std::sort(removed_.begin(), removed_.end(),
              [&](const Removal& a, const Removal& b) { return place(a) < place(b); });
    const auto same = [&](const Removal& a, const Removal& b) { return place(a) == place(b); };
    removed_.erase(std::unique(removed_.begin(), removed_.end(), same), removed_.end());
  }

  // One run: rows of a part, if any, and keys removed from its table, from `gone` on. Returns the end of these.
  size_t write(uint32_t bucket, const Part* part, size_t gone) {
    const uint32_t table = part ? part->table : removed_[gone].table, rows = part ? part->end - part->begin : 0;
    size_t end = gone;
    while (end < removed_.size() && removed_[end].table == table) end++;
    const RunEntry run{bucket, table, rows, static_cast<uint32_t>(end - gone), out_.body.size(), 0, 0};
    uint8_t* const keys = out_.body.extend(run.bytes(widths_[table]));
    for (size_t i = gone; i < end; i++) store_key(keys, rows + i - gone, removed_[i].key);
    uint8_t* record = keys + run.keys_bytes();
    for (uint32_t i = 0; i < rows; i++, record += widths_[table]) {
      const Group& group = *store_.groups_[part->group];
      const KeyAt& row = rows_[part->begin + i];
      store_key(keys, i, row.key);
      group.layout.pack(group.row(row.row), record);
    }
    out_.directory.push_back(run);
    return end;
  }

  Store& store_;
  const RecordWidths widths_;
  RunColumns& out_;
  size_t unsealed_ = 0;  // first run without checksums
  std::vector<uint32_t> slots_;
  std::vector<KeyAt> rows_, scratch_;  // key, table, slot
  std::vector<Part> parts_;
  std::vector<Removal> removed_;
};

FlushBatch Store::collect_flush(const std::vector<uint32_t>& buckets, bool whole) {
  FlushBatch out;
  for (const uint32_t b : buckets) check_bucket(b);
  if (std::adjacent_find(buckets.begin(), buckets.end(), std::greater_equal<>()) != buckets.end())
    throw std::invalid_argument("buckets of a flush must rise");
  check_cold();  // rows that an earlier flush copied before a fault were not written: no offsets may pass them
  Taker taker(*this, out.runs);
  for (const uint32_t b : buckets) {
    BucketState& state = states_[b];
    {
      const std::unique_lock lock = lock_brought(b, whole);
      if (!state.held || state.loading) continue;
      out.buckets.push_back(b);
      out.rows.push_back(taker.take(b, whole));
      out.clock_ms.push_back(clock_at(b));
      for (uint32_t p = 0; p < spec_.partitions; p++) out.applied.push_back(offset_at(p, b));
    }
    taker.seal_last();
  }
  return out;
}

namespace {

// Publishing starts where it stopped last time and may pass the last bucket: rows before and after that.
struct Halves {
  std::array<std::map<uint8_t, PublishedTable>, 2> half;  // by table
  PublishedTable& of(uint32_t side, uint8_t table, uint32_t width) {
    PublishedTable& out = half[side][table];
    out.table = table;
    out.width = width;
    return out;
  }
};

}  // namespace

void Store::round_published(int bits, const std::vector<uint32_t>& scalars) {
  if (scalars.size() != groups_.size()) throw std::invalid_argument("scalars must name every store group");
  rounded_ = true;
  for (size_t g = 0; bits < 16 && g < groups_.size(); g++) groups_[g]->keep_served(bits, scalars[g]);
}

// Under the bucket's lock, like the next two.
void Store::set_inexact(Bin& bin, Header& row) {
  if (!rounded_ || (row.meta & meta::kInexact)) return;
  row.meta |= meta::kInexact;
  bin.inexact++;
  inexact_.fetch_add(1, std::memory_order_relaxed);
}

void Store::clear_inexact(Bin& bin, Header& row) {
  if (!(row.meta & meta::kInexact)) return;
  row.meta &= ~meta::kInexact;
  bin.inexact--;
  inexact_.fetch_sub(1, std::memory_order_relaxed);
}

bool Store::copy_published(Group& group, uint32_t slot, PublishedTable& out, bool all) {
  const uint32_t width = group.layout.width();
  Header& row = group.header(slot);
  float* values = out.values.extend(width);
  group.layout.load(group.row(slot), values);
  if (group.served) {
    if (!all && (row.meta & meta::kServed) && group.served->is_near(slot, values)) {
      out.values.drop_last(width);
      return false;
    }
    group.served->set(slot, values);
    row.meta |= meta::kServed;
  }
  out.keys.push_back(row.key);
  return true;
}

template <typename Visit>
PublishBatch Store::collect_in_turn(uint32_t& cursor, int64_t max_rows, Visit visit) {
  const std::lock_guard publishing(publish_lock_);
  Halves halves;
  const uint32_t first = cursor;
  int64_t left = std::max<int64_t>(max_rows, 0);
  for (uint32_t n = 0; n < spec_.buckets && left > 0; n++) {
    const uint32_t b = (first + n) & (spec_.buckets - 1);
    const std::lock_guard lock(states_[b].lock);
    const auto table_of = [&](uint8_t table) -> PublishedTable& {
      return halves.of(b < first, table, groups_[group_of(table)]->layout.width());
    };
    left -= visit(b, left, table_of);
    cursor = left > 0 ? (b + 1) & (spec_.buckets - 1) : b;
  }
  PublishBatch out;
  for (auto& [table, part] : halves.half[1]) out.tables.push_back(std::move(part));
  for (auto& [table, part] : halves.half[0]) {
    const uint8_t id = table;
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

PublishBatch Store::collect_publish(int64_t max_rows) {
  int64_t passed = 0;
  PublishBatch batch = collect_in_turn(publish_cursor_, max_rows, [&](uint32_t b, int64_t left, const auto& table_of) {
    int64_t taken = 0;
    for (const auto& group : groups_) {
      Bin& bin = group->bin(b);
      std::vector<uint32_t>& dirty = bin.dirty[publish];
      const size_t take = std::min<size_t>(dirty.size(), static_cast<size_t>(left - taken));
      for (size_t i = 0; i < take; i++) {
        if (i + kAhead < take) group->prefetch_slot(dirty[dirty.size() - 1 - i - kAhead]);
        const uint32_t slot = dirty[dirty.size() - 1 - i];
        Header& row = group->header(slot);
        row.meta &= ~meta::kDirtyPublish;
        set_inexact(bin, row);
        passed += !copy_published(*group, slot, table_of(static_cast<uint8_t>(row.meta & meta::kTableMask)), false);
      }
      dirty.resize(dirty.size() - take);
      pending_[publish].fetch_sub(static_cast<int64_t>(take), std::memory_order_relaxed);
      taken += static_cast<int64_t>(take);
    }
    BucketState& state = states_[b];
    for (const Removal& gone : state.removed[publish]) {
      Group& group = *groups_[group_of(gone.table)];
      const uint32_t slot = group.find(group.bin(b), gone.key, gone.table);
      if (slot == Group::kNone || !changed(group.header(slot))) table_of(gone.table).removed.push_back(gone.key);
    }
    state.removed[publish].clear();
    drained_.fetch_add(taken < left, std::memory_order_relaxed);
    return taken;
  });
  batch.passed = passed;
  return batch;
}

PublishBatch Store::collect_inexact(int64_t max_rows) {
  return collect_in_turn(inexact_cursor_, max_rows, [&](uint32_t b, int64_t left, const auto& table_of) {
    int64_t taken = 0;
    if (!states_[b].held || states_[b].loading) return taken;  // rows that are still read may be dropped again
    for (const auto& group : groups_) {
      Bin& bin = group->bin(b);
      for (uint32_t i = 0; i < bin.rows && bin.inexact && taken < left; i++) {
        const uint32_t slot = group->slot_at(bin, i);
        Header& row = group->header(slot);
        if ((row.meta & (meta::kInexact | meta::kDirtyPublish)) != meta::kInexact) continue;
        clear_inexact(bin, row);
        copy_published(*group, slot, table_of(static_cast<uint8_t>(row.meta & meta::kTableMask)), true);
        taken++;
      }
    }
    return taken;
  });
}

}  // namespace freshet
