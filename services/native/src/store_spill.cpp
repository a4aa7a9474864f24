// Rows that leave memory for the disk, by a thread of the store's own.
#include <stdexcept>

#include "store_cold.hpp"

namespace freshet {

namespace {

constexpr double kLeastShare = 0.3;   // of a bucket's rows that go at a time, so that they fill pages
constexpr uint32_t kMostRounds = 32;  // over all buckets, in which no row could leave

uint32_t hot_of(const Header& row) { return (row.meta >> meta::kHotShift) & meta::kMostHot; }

}  // namespace

// Under the bucket's lock: the row leaves memory; the disk holds it. Sets `relist` as `forget` does.
void Store::drop_to_disk(Group& group, uint32_t bucket, uint32_t slot, bool& relist) {
  Bin& bin = group.bin(bucket);
  ColdBin& cold = group.cold->bin(bucket);
  const Header row = group.header(slot), last = group.header(group.slot_at(bin, bin.rows - 1));
  relist = relist || ((row.meta | last.meta) & (meta::kDirtyPublish | meta::kDirtyFlush));
  cold.rows[table_index(group, static_cast<uint8_t>(row.meta & meta::kTableMask))]++;
  cold.dirty += (row.meta & meta::kDirtyFlush) != 0;
  group.erase(bin, slot);
}

// Rows of a bucket on their way to disk.
struct Store::Spill {
  std::vector<RowId> ids;
  std::vector<uint8_t> records;     // as on a page
  std::vector<ColdPage> log, base;  // if they are merged: the bucket's pages as they were
  RowIds outdated, erased;          // then: rows whose records on disk are worth nothing
  bool merge = false;
  std::vector<int64_t> written;  // rows of each of the group's tables on the new pages, if they are merged
  uint32_t version = 0, epoch = 0;
};

// Under the bucket's lock: choose what goes. Rows that the disk holds as they are leave at once, and count in `gone`.
void Store::plan_spill(Group& group, uint32_t bucket, size_t want, bool full, Spill& spill, size_t& gone) {
  ColdRows& cold = *group.cold;
  ColdBin& bin = cold.bin(bucket);
  Bin& rows = group.bin(bucket);
  std::vector<RowId> clean, changed;
  bin.begin(cold_->period());
  for (uint32_t row = 0; row < rows.rows; row++) {
    Header& header = group.header(group.slot_at(rows, row));
    const RowId id{header.key, static_cast<uint8_t>(header.meta & meta::kTableMask)};
    if (!(header.meta & meta::kOnDisk)) spill.outdated.insert(id);
    if ((header.meta & meta::kDirtyPublish) || (spec_.serving && bin.fetched_lately(id))) continue;
    cold_->movable++;
    if (const uint32_t hot = hot_of(header)) {
      // Rows that are used often stay for more rounds: each level is left four times as slowly as the one below.
      if ((cold_->random() & ((1u << (2 * (hot - 1))) - 1)) == 0) header.meta -= 1u << meta::kHotShift;
      continue;
    }
    if (header.meta & meta::kOnDisk)
      clean.push_back(id);
    else if (!bin.erased.contains(id))
      changed.push_back(id);
  }
  bool relist = false;
  for (size_t i = 0; i < clean.size() && gone < want; i++, gone++)
    drop_to_disk(group, bucket, group.find(rows, clean[i].key, clean[i].table), relist);
  if (relist) group.relist(rows);
  if (gone) {
    bin.next_version();
    group.shrink(rows, bucket);
  }
  want = full ? 0 : std::min(want - gone, changed.size());
  if (want > cold.rows_of_page()) want -= want % cold.rows_of_page();  // whole pages
  spill.merge = bin.log_rows + want > cold.log_limit(bin) ||
                bin.log.size() + want / cold.rows_of_page() + 1 > ColdRows::kMostLogPages ||
                bin.erased.size() * 8 > bin.base_rows + 64;
  if (want == 0 && !(spill.merge && bin.log_rows + bin.erased.size() > 0)) return;
  spill.version = bin.version;
  spill.epoch = bin.epoch;
  if (spill.merge) {
    spill.log = bin.log;
    spill.base = bin.base;
    spill.erased = bin.erased;
  }
  changed.resize(want);
  spill.ids.swap(changed);
  const uint32_t bytes = cold.record_bytes();
  spill.records.resize(spill.ids.size() * bytes);
  for (size_t i = 0; i < spill.ids.size(); i++) {
    const uint32_t slot = group.find(rows, spill.ids[i].key, spill.ids[i].table);
    const Header& row = group.header(slot);
    uint8_t* at = spill.records.data() + i * bytes;
    ColdRecord::write(at, row.key, row.meta & meta::kDirtyFlush, row.meta & meta::kStored, bin.epoch);
    group.layout.pack(group.row(slot), at + ColdRecord::kHead);
  }
}

// full: rows that the disk does not hold stay, but pages are merged that return some.
size_t Store::spill(Group& group, uint32_t bucket, size_t want, bool full) {
  ColdRows& cold = *group.cold;
  BucketState& state = states_[bucket];
  Spill spill;
  size_t gone = 0;
  {
    const std::lock_guard lock(state.lock);
    if (state.loading || cold.bin(bucket).damaged) return 0;
    plan_spill(group, bucket, want, full, spill, gone);
    cold_->spilled += static_cast<int64_t>(gone);
    if (spill.version == 0) return gone;
  }
  const size_t page_bytes = cold.file.page_bytes();
  const uint32_t bytes = cold.record_bytes();
  std::vector<ColdFile::Transfer> transfers;
  const PageBuffers old(page_bytes, spill.log.size() + spill.base.size());
  std::vector<uint16_t> sums;
  const auto want_page = [&](const ColdPage& page) {
    transfers.push_back({page.number, old.at(transfers.size())});
    sums.push_back(page.sum);
  };
  std::for_each(spill.log.rbegin(), spill.log.rend(), want_page);
  std::for_each(spill.base.begin(), spill.base.end(), want_page);
  read_pages(cold, transfers);
  std::vector<const uint8_t*> records;  // that the new pages get
  for (size_t i = 0; i < spill.ids.size(); i++) {
    records.push_back(spill.records.data() + i * bytes);
    if (spill.merge) spill.outdated.insert(spill.ids[i]);
  }
  for (size_t p = 0; p < transfers.size(); p++) {
    const ColdFile::Transfer& page = transfers[p];
    if (!cold.sound(page.buffer, bucket, sums[p])) {
      const std::lock_guard lock(state.lock);
      if (cold.bin(bucket).version != spill.version) return gone;  // the bucket was dropped
      throw damaged(page.page, bucket);
    }
    for (uint32_t i = 0; i < cold.rows_in(page.buffer); i++) {
      const ColdRecord record = cold.record(page.buffer, i);
      // The latest record of a row comes first.
      if (!spill.erased.contains(record.id()) && spill.outdated.insert(record.id()).second)
        records.push_back(record.packed() - ColdRecord::kHead);
    }
  }
  spill.written.assign(group.tables.size(), 0);
  for (const uint8_t* record : records) spill.written[table_index(group, ColdRecord(record).table())]++;
  size_t n_pages = spill.merge ? cold.base_pages_for(records.size())
                               : (records.size() + cold.rows_of_page() - 1) / cold.rows_of_page();
  std::unique_ptr<PageBuffers> fresh;
  std::vector<ColdRows::Builder> builders;
  for (bool fits = false; !fits; n_pages += fits ? 0 : n_pages / 8 + 1) {
    fresh = std::make_unique<PageBuffers>(page_bytes, n_pages);
    builders.clear();
    for (size_t i = 0; i < n_pages; i++) builders.emplace_back(cold, bucket, fresh->at(i));
    fits = true;
    for (size_t i = 0; i < records.size() && fits; i++) {
      size_t page = i / cold.rows_of_page();
      if (spill.merge) {
        const auto [a, b] = ColdRows::homes(ColdRecord(records[i]).id(), n_pages);
        page = builders[a].page.rows <= builders[b].page.rows ? a : b;
      }
      fits = !builders[page].full();
      if (fits) builders[page].add(records[i], spill.epoch);
    }
  }
  std::vector<uint32_t> numbers;
  if (!cold.file.take(n_pages, spill.log.size() + spill.base.size(), cold.pages_of_merge(), numbers)) {
    cold.full = true;
    return gone;
  }
  if (!spill.merge) cold.full = false;  // a merge may fit where rows that leave memory do not
  transfers.clear();
  for (size_t i = 0; i < n_pages; i++) {
    builders[i].seal();
    builders[i].page.number = numbers[i];
    transfers.push_back({numbers[i], fresh->at(i)});
  }
  cold.file.write(transfers.data(), n_pages);
  cold_->pages_written += static_cast<int64_t>(n_pages);
  return gone + finish_spill(group, bucket, spill, builders);
}

// The pages are written: they become the bucket's, and rows that have not changed meanwhile leave memory.
size_t Store::finish_spill(Group& group, uint32_t bucket, const Spill& spill,
                           const std::vector<ColdRows::Builder>& builders) {
  ColdRows& cold = *group.cold;
  const std::lock_guard lock(states_[bucket].lock);
  ColdBin& bin = cold.bin(bucket);
  Bin& rows = group.bin(bucket);
  if (bin.version != spill.version) {  // the bucket was dropped
    std::vector<uint32_t> unused;
    for (const ColdRows::Builder& one : builders) unused.push_back(one.page.number);
    cold.file.release(unused.data(), unused.size());
    return 0;
  }
  if (spill.merge) {
    std::vector<ColdPage> base;
    for (const ColdRows::Builder& one : builders) base.push_back(one.page);
    cold.replace(bin, std::move(base), spill.erased);
  } else {
    size_t at = 0;
    for (const ColdRows::Builder& one : builders) {
      cold.append(bin, one.page, spill.ids.data() + at, one.page.rows);
      at += one.page.rows;
    }
  }
  bin.next_version();
  const uint32_t bytes = cold.record_bytes();
  std::vector<uint8_t> now(bytes);
  bool relist = false;
  size_t gone = 0;
  for (size_t i = 0; i < spill.ids.size(); i++) {
    const RowId id = spill.ids[i];
    const uint32_t slot = group.find(rows, id.key, id.table);
    if (slot == Group::kNone) {
      cold.erase(bin, id);  // removed meanwhile
      continue;
    }
    Header& row = group.header(slot);
    group.layout.pack(group.row(slot), now.data());
    const ColdRecord record(spill.records.data() + i * bytes);
    const bool same = std::memcmp(now.data(), record.packed(), bytes - ColdRecord::kHead) == 0 &&
                      record.dirty(bin.epoch) == ((row.meta & meta::kDirtyFlush) != 0) &&
                      record.stored(bin.epoch) == ((row.meta & meta::kStored) != 0);
    if (!same || bin.erased.contains(id)) continue;  // changed meanwhile, or removed and made again
    row.meta |= meta::kOnDisk;
    if (hot_of(row) || (row.meta & meta::kDirtyPublish) || bin.fetched_lately(id)) continue;
    drop_to_disk(group, bucket, slot, relist);
    gone++;
  }
  if (spill.merge && spec_.serving) recount_cold(group, bucket, spill.written);
  if (relist) group.relist(rows);
  if (gone) group.shrink(rows, bucket);
  cold_->spilled += static_cast<int64_t>(gone);
  return gone;
}

// Under the bucket's lock, of a serving store, whose counts are estimates between merges: the pages hold `written` rows
// of each table, some of which are in memory, too.
void Store::recount_cold(Group& group, uint32_t bucket, const std::vector<int64_t>& written) {
  std::vector<int64_t> alone = written;
  const Bin& rows = group.bin(bucket);
  for (uint32_t row = 0; row < rows.rows; row++) {
    const Header& header = group.header(group.slot_at(rows, row));
    if (header.meta & meta::kOnDisk) alone[table_index(group, static_cast<uint8_t>(header.meta & meta::kTableMask))]--;
  }
  ColdBin& bin = group.cold->bin(bucket);
  for (size_t t = 0; t < alone.size(); t++)
    rows_[group.tables[t]].fetch_add(alone[t] - bin.rows[t], std::memory_order_relaxed);
  bin.rows = alone;
}

void Store::spill_loop() {
  const auto limit = static_cast<double>(cold_->spec.memory_bytes);
  std::unique_lock lock(cold_->mutex);
  while (!cold_->stop) {
    if (static_cast<double>(hot_bytes()) <= limit * kSpillFrom) {
      for (const auto& group : groups_) group->cold->full = false;
      cold_->wake.wait_for(lock, std::chrono::milliseconds(100));
      continue;
    }
    lock.unlock();
    try {
      const size_t gone = spill_round();
      lock.lock();
      cold_->stuck = gone == 0;
      // Lanes that are short of memory notify: that frees no page of a full disk, and publishes no row.
      if (gone == 0 && is_full())
        cold_->wake.wait_for(lock, kSpillPause * 250, [&] { return cold_->stop.load(); });
      else if (gone == 0)
        cold_->wake.wait_for(lock, kSpillPause * 10, [&] { return cold_->stop.load(); });
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      if (cold_->fault.empty()) cold_->fault = error.what();
      cold_->stuck = true;
      cold_->room.notify_all();
      return;
    }
  }
}

// Visit buckets until memory has come down, at least one round of them. Rows that are in use leave once their uses have
// been counted down, in a later round.
size_t Store::spill_round() {
  const auto limit = static_cast<double>(cold_->spec.memory_bytes);
  size_t gone = 0;
  for (uint32_t n = 0; n < spec_.buckets || (gone == 0 && n < kMostRounds * spec_.buckets); n++) {
    if (n % spec_.buckets == 0) {
      if (n && cold_->movable == 0) break;
      cold_->movable = 0;
    }
    const double used = static_cast<double>(hot_bytes());
    if (used <= limit * kSpillTo || cold_->stop || (is_full() && n >= spec_.buckets)) break;
    const double share = std::max(1.0 - limit * kSpillTo / used, kLeastShare);
    const uint32_t bucket = cold_->cursor++ & (spec_.buckets - 1);
    for (const auto& group : groups_) {
      size_t rows;
      bool erased;
      {
        const std::lock_guard held(states_[bucket].lock);
        rows = group->bin(bucket).rows;
        erased = !group->cold->bin(bucket).erased.empty();
      }
      const std::lock_guard moving(cold_->moving);
      if (rows == 0 && !erased) continue;
      try {
        // One bucket a round finds out whether the disk has pages again.
        const bool full = group->cold->full && n % spec_.buckets > 0;
        gone += spill(*group, bucket, static_cast<size_t>(share * static_cast<double>(rows)) + 1, full);
        if (gone) cold_->stuck = false;  // lanes wait again, not only from the next round on
      } catch (const ColdFault& fault) {
        if (!spec_.serving) throw;
        fail(fault);  // its other buckets serve until the table is replaced
        const std::lock_guard held(states_[bucket].lock);
        group->cold->bin(bucket).damaged = true;
      }
    }
    cold_->room.notify_all();
  }
  return gone;
}

}  // namespace freshet
