// Rows on disk: fetched before a batch needs them, moved there by a thread of the store's own once memory is short
// (PROTOCOL 8 and 12). The disk holds what memory would hold, no more: a row that was changed since the last flush is
// taken by the next one wherever it is, and what the process had on disk is gone with it.
#include "store_cold.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace freshet {

namespace {

constexpr size_t kPagesAtOnce = 128;

}  // namespace

void Store::ColdDeleter::operator()(Cold* cold) const { delete cold; }

void Store::free_rows() {
  if (cold_) {
    {
      const std::lock_guard lock(cold_->mutex);
      cold_->stop = true;
    }
    cold_->wake.notify_all();
    cold_->room.notify_all();
    if (cold_->thread.joinable()) cold_->thread.join();
  }
  groups_.clear();
}

void Store::keep_cold(const ColdSpec& spec) {
  if (rounded_) throw std::invalid_argument("rows that are published rounded cannot be kept on disk: publish in fp32");
  if (cold_) throw std::invalid_argument("the store keeps rows on disk already");
  const auto budget = std::make_shared<DiskBudget>(spec.disk_bytes);
  for (size_t g = 0; g < groups_.size(); g++) {
    auto& group = groups_[g];
    if (spec_.serving)
      group = std::make_unique<Group>(spec_.groups[g].slots, spec_.groups[g].half, true, group->tables, spec_.buckets,
                                      Group::kFewRows);
    group->cold = std::make_unique<ColdRows>(spec.folder, budget, group->layout.packed_bytes(), group->tables.size(),
                                             spec_.buckets);
  }
  cold_.reset(new Cold);
  cold_->spec = spec;
  cold_->thread = std::thread([this] { spill_loop(); });
}

size_t Store::hot_bytes() const {
  size_t sum = 0;
  for (const auto& group : groups_) sum += group->bytes() + (group->cold ? group->cold->bytes() : 0);
  return sum;
}

ColdCounts Store::cold_counts() const {
  ColdCounts out;
  if (!cold_) return out;
  out.fetched = cold_->fetched;
  out.spilled = cold_->spilled;
  out.pages_read = cold_->pages_read;
  out.pages_written = cold_->pages_written;
  out.waits = cold_->waits;
  out.full = is_full();
  for (uint32_t b = 0; b < spec_.buckets; b++) {
    const std::lock_guard lock(states_[b].lock);
    for (const auto& group : groups_)
      for (const int64_t rows : group->cold->bin(b).rows) out.rows += rows;
  }
  out.rows = std::max<int64_t>(0, out.rows);  // an estimate, of a serving store
  for (const auto& group : groups_) {
    out.bytes_in_use += static_cast<int64_t>(group->cold->file.bytes_in_use());
    out.bytes_on_disk += static_cast<int64_t>(group->cold->file.bytes_on_disk());
  }
  return out;
}

// The first fault stays: `evict`, which runs now and then, reports it, and the process must end. Its rows on disk are
// read from the row store and the log when it starts again.
void Store::fail(const ColdFault& fault) const {
  const std::lock_guard lock(cold_->mutex);
  if (cold_->fault.empty()) cold_->fault = fault.what();
}

void Store::check_cold() const {
  if (!cold_) return;
  const std::lock_guard lock(cold_->mutex);
  if (!cold_->fault.empty()) throw ColdFault(cold_->fault);
}

ColdFault Store::damaged(uint32_t page, uint32_t bucket) const {
  const ColdFault fault("a page of cold rows, number " + std::to_string(page) + " of bucket " + std::to_string(bucket) +
                        ", is not as it was written: check the disk");
  fail(fault);
  return fault;
}

void Store::read_pages(const ColdRows& cold, const std::vector<ColdFile::Transfer>& transfers) {
  try {
    cold.file.read(transfers.data(), transfers.size());
  } catch (const ColdFault& fault) {
    fail(fault);
    throw;
  }
  cold_->pages_read.fetch_add(static_cast<int64_t>(transfers.size()), std::memory_order_relaxed);
}

// Under the bucket's lock: a row that is on disk alone.
void Store::take_cold(Group& group, uint32_t bucket, ColdRecord record) {
  Bin& bin = group.bin(bucket);
  ColdBin& cold = group.cold->bin(bucket);
  std::vector<uint32_t>& dirty = bin.dirty[flush];
  if (dirty.size() == dirty.capacity()) dirty.reserve(2 * dirty.size() + 8);  // nothing is half done without memory
  const uint32_t slot = group.insert(bin, bucket, record.key(), record.table());
  group.layout.unpack(group.row(slot), record.packed());
  Header& row = group.header(slot);
  row.meta |= meta::kOnDisk | (1u << meta::kHotShift) | (spec_.serving ? meta::kFetched : 0);
  if (record.stored(cold.epoch)) row.meta |= meta::kStored;
  if (record.dirty(cold.epoch)) {
    row.meta |= meta::kDirtyFlush;
    dirty.push_back(slot);
    cold.dirty--;
  }
  cold.rows[table_index(group, record.table())]--;
}

// Wait while the limit of memory is passed and rows can leave, or once if `briefly`. Otherwise memory must do: who
// publishes may wait for us.
void Store::wait_for_room(bool briefly) {
  const auto short_of = [&] { return hot_bytes() > cold_->spec.memory_bytes && !is_full() && !cold_->stuck; };
  if (hot_bytes() > static_cast<size_t>(static_cast<double>(cold_->spec.memory_bytes) * kSpillFrom))
    cold_->wake.notify_one();
  if (hot_bytes() <= cold_->spec.memory_bytes) return;
  // A serving store goes on after a fault until another takes its place.
  const auto check = [&] {
    if (!spec_.serving && !cold_->fault.empty()) throw ColdFault(cold_->fault);
  };
  std::unique_lock lock(cold_->mutex);
  check();
  if (!short_of()) return;
  cold_->waits++;
  do {
    cold_->wake.notify_one();
    cold_->room.wait_for(lock, kSpillPause);
    check();
  } while (!briefly && short_of());
}

bool Store::is_full() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->cold->full.load(); });
}

void Store::fetch_spans(Group& group, std::vector<KeySpan> spans, const uint64_t* keys, const uint8_t* tables,
                        bool one_table, uint8_t* here) {
  ColdRows& cold = *group.cold;
  struct Want {
    uint32_t page;   // in the file
    uint32_t order;  // of a key's pages, the one that counts first
    uint32_t span;
    uint8_t table;
    uint16_t sum;  // of the page
    uint64_t key;
    size_t at;  // of the keys
  };
  // Under the bucket's lock.
  const auto found = [&](ColdBin& bin, const RowId& id, size_t at) {
    if (here) here[at] = 1;
    if (!spec_.serving) return;
    bin.begin(cold_->period());
    bin.fetched.insert(id);
  };
  std::vector<Want> wants;
  std::vector<const ColdPage*> pages;
  for (Retry retry(*cold_); !spans.empty(); retry.again()) {
    wants.clear();
    for (uint32_t s = 0; s < spans.size(); s++) {
      KeySpan& span = spans[s];
      span.again = false;
      const std::lock_guard lock(states_[span.bucket].lock);
      ColdBin& bin = cold.bin(span.bucket);
      span.version = bin.version;
      span.merges = bin.merges;
      if (bin.empty() && !here) continue;
      for (size_t i = span.begin; i < span.end; i++) {
        const RowId id{keys[i], tables[one_table ? 0 : i]};
        if (group.find(group.bin(span.bucket), id.key, id.table) != Group::kNone) {
          found(bin, id, i);
          continue;
        }
        const size_t logged = cold.pages_of(bin, id, pages);
        // The latest page of the log that may hold it, most often the only one, does; if not, all are read.
        const size_t n = logged && !span.thorough ? 1 : pages.size();
        for (size_t p = 0; p < n; p++)
          wants.push_back({pages[p]->number, static_cast<uint32_t>(p), s, id.table, pages[p]->sum, id.key, i});
      }
    }
    const bool thorough = std::any_of(spans.begin(), spans.end(), [](const KeySpan& span) { return span.thorough; });
    std::sort(wants.begin(), wants.end(), [&](const Want& a, const Want& b) {
      return thorough && a.order != b.order ? a.order < b.order : a.page < b.page;
    });
    const PageBuffers buffers(cold.file.page_bytes(), std::min(wants.size(), kPagesAtOnce));
    std::vector<ColdFile::Transfer> transfers;
    for (size_t first = 0, end; first < wants.size(); first = end) {
      transfers.clear();
      for (end = first; end < wants.size(); end++) {
        if (!transfers.empty() && transfers.back().page == wants[end].page) continue;
        if (transfers.size() == kPagesAtOnce) break;
        transfers.push_back({wants[end].page, buffers.at(transfers.size())});
      }
      read_pages(cold, transfers);
      size_t at = first;
      for (const ColdFile::Transfer& page : transfers) {
        const bool whole = cold.is_whole(page.buffer);
        for (; at < end && wants[at].page == page.page; at++) {
          const Want& want = wants[at];
          KeySpan& span = spans[want.span];
          const RowId id{want.key, want.table};
          // It may be another's by now.
          const bool sound =
              whole && cold.bucket_of(page.buffer) == span.bucket && cold.sum_of(page.buffer) == want.sum;
          const uint8_t* record = sound ? cold.find(page.buffer, id) : nullptr;
          if (sound && record == nullptr) {
            const ColdBin& bin = cold.bin(span.bucket);
            const std::lock_guard lock(states_[span.bucket].lock);
            span.again =
                span.again || bin.merges != span.merges || (!span.thorough && cold.pages_of(bin, id, pages) > 0);
            continue;
          }
          const std::lock_guard lock(states_[span.bucket].lock);
          ColdBin& bin = cold.bin(span.bucket);
          if (bin.version != span.version) {
            // Rows have left memory since, if not this one; while no pages were replaced, those read are as they were.
            const size_t logged = cold.pages_of(bin, id, pages);
            const auto stop = logged ? pages.begin() + 1 : pages.end();
            const bool latest =
                bin.merges == span.merges &&
                std::any_of(pages.begin(), stop, [&](const ColdPage* holds) { return holds->number == page.page; });
            if (!latest) {
              span.again = true;
              continue;
            }
          }
          if (!sound) throw damaged(page.page, span.bucket);
          if (bin.erased.contains(id)) continue;
          found(bin, id, want.at);
          if (group.find(group.bin(span.bucket), id.key, id.table) != Group::kNone) continue;
          take_cold(group, span.bucket, ColdRecord(record));
          cold_->fetched.fetch_add(1, std::memory_order_relaxed);
        }
      }
    }
    std::vector<KeySpan> again;
    for (KeySpan& span : spans) {
      if (span.again) {
        span.thorough = true;
        again.push_back(span);
      } else if (span.seen) {
        *span.seen = span.version;
      }
    }
    spans.swap(again);
  }
}

std::vector<uint32_t> Store::fetch_batch(uint32_t index, const Keys& keys, uint8_t* here) {
  if (!cold_) return {};
  wait_for_room(spec_.serving);  // requests wait longer for rows, and not until deltas have their memory
  std::vector<KeySpan> spans;
  std::vector<uint32_t> seen(spec_.buckets, 0);
  for (uint32_t b = 0; b < spec_.buckets; b++)
    if (keys.bucket_starts[b] != keys.bucket_starts[b + 1])
      spans.push_back({b, keys.bucket_starts[b], keys.bucket_starts[b + 1], &seen[b]});
  fetch_spans(*groups_[index], std::move(spans), keys.keys, keys.tables, false, here);
  return seen;
}

void Store::fetch(uint32_t group, const Keys& keys, uint8_t* here) {
  check_keys(group, keys);
  if (here) std::fill_n(here, keys.n, uint8_t{0});
  fetch_batch(group, keys, here);
}

// Rows of keys in any order.
void Store::fetch_keys(uint8_t table, const uint64_t* keys, size_t n) {
  if (!cold_) return;
  std::vector<uint64_t> sorted(keys, keys + n);
  std::sort(sorted.begin(), sorted.end());
  std::vector<KeySpan> spans;
  for (size_t i = 0; i < n; i++) {
    const uint32_t bucket = bucket_of(sorted[i]);
    if (spans.empty() || spans.back().bucket != bucket) spans.push_back({bucket, i, i});
    spans.back().end = i + 1;
  }
  fetch_spans(*groups_[group_of(table)], std::move(spans), sorted.data(), &table, true);
}

std::unique_lock<SpinLock> Store::lock_fetched(uint32_t bucket, Fetched* parts, size_t n) {
  if (!cold_) return std::unique_lock(states_[bucket].lock);
  for (Retry retry(*cold_);; retry.again()) {
    std::unique_lock lock(states_[bucket].lock);
    Fetched* behind = nullptr;
    for (size_t i = 0; i < n; i++)
      if (!parts[i].seen.empty() && parts[i].seen[bucket] != 0 &&
          parts[i].seen[bucket] != groups_[parts[i].group]->cold->bin(bucket).version)
        behind = &parts[i];
    if (behind == nullptr) return lock;
    lock.unlock();
    const Keys& keys = behind->keys;
    fetch_spans(*groups_[behind->group],
                {{bucket, keys.bucket_starts[bucket], keys.bucket_starts[bucket + 1], &behind->seen[bucket]}},
                keys.keys, keys.tables, false);
  }
}

// The same in the middle of a push, which must not end half done.
std::unique_lock<SpinLock> Store::lock_to_apply(uint32_t bucket, std::vector<Fetched>& parts) noexcept {
  try {
    return lock_fetched(bucket, parts.data(), parts.size());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "freshet: a push cannot be applied whole, the process ends: %s\n", error.what());
    std::abort();
  }
}

std::unique_lock<SpinLock> Store::lock_fetched(uint32_t bucket, uint8_t table, const uint64_t* keys, size_t n) {
  Group& group = *groups_[group_of(table)];
  if (!cold_) return std::unique_lock(states_[bucket].lock);
  uint32_t seen = 0;
  for (Retry retry(*cold_);; retry.again()) {
    std::unique_lock lock(states_[bucket].lock);
    if (group.cold->bin(bucket).empty() || seen == group.cold->bin(bucket).version) return lock;
    lock.unlock();
    fetch_spans(group, {{bucket, 0, n, &seen}}, keys, &table, true);
  }
}

// Visit the records on a bucket's pages that `choose(page, bin)` names, a row's latest first, under the bucket's lock,
// while no row leaves memory for disk; then some are left. Returns the version of the bucket's rows on disk that was
// read.
template <typename Choose, typename Visit>
uint32_t Store::each_record(Group& group, uint32_t bucket, Choose choose, Visit visit) {
  ColdRows& cold = *group.cold;
  std::vector<std::pair<uint32_t, uint16_t>> chosen;  // numbers and sums
  uint32_t version;
  {
    const std::lock_guard lock(states_[bucket].lock);
    const ColdBin& bin = cold.bin(bucket);
    version = bin.version;
    const auto add = [&](const ColdPage& page) {
      if (page.rows && choose(page, bin)) chosen.push_back({page.number, page.sum});
    };
    std::for_each(bin.log.rbegin(), bin.log.rend(), add);
    std::for_each(bin.base.begin(), bin.base.end(), add);
  }
  const PageBuffers buffers(cold.file.page_bytes(), std::min(chosen.size(), kPagesAtOnce));
  std::vector<ColdFile::Transfer> transfers;
  for (size_t first = 0; first < chosen.size(); first += kPagesAtOnce) {
    transfers.clear();
    for (size_t i = first; i < std::min(chosen.size(), first + kPagesAtOnce); i++)
      transfers.push_back({chosen[i].first, buffers.at(i - first)});
    read_pages(cold, transfers);
    for (size_t i = 0; i < transfers.size(); i++) {
      const ColdFile::Transfer& page = transfers[i];
      const bool sound = cold.sound(page.buffer, bucket, chosen[first + i].second);
      const std::lock_guard lock(states_[bucket].lock);
      if (cold.bin(bucket).version != version) return version;
      if (!sound) throw damaged(page.page, bucket);
      for (uint32_t r = 0; r < cold.rows_in(page.buffer); r++) visit(cold.record(page.buffer, r));
    }
  }
  return version;
}

// Bring the rows on disk that the next flush must take, or all of a bucket's. Some may be left: the caller looks again.
void Store::bring(Group& group, uint32_t bucket, bool all) {
  each_record(
      group, bucket,
      [&](const ColdPage& page, const ColdBin& bin) { return all || (page.dirty && page.dirty_epoch == bin.epoch); },
      [&](const ColdRecord& record) {
        const ColdBin& bin = group.cold->bin(bucket);
        if ((all || record.dirty(bin.epoch)) && !bin.erased.contains(record.id()) &&
            group.find(group.bin(bucket), record.key(), record.table()) == Group::kNone) {
          take_cold(group, bucket, record);
          cold_->fetched++;
        }
      });
}

// The record that counts of each row on a bucket's pages, unless rows leave memory meanwhile; returns the version that
// was read.
uint32_t Store::copy_cold(Group& group, uint32_t bucket, std::vector<uint8_t>& records) {
  RowIds found;
  return each_record(
      group, bucket, [](const ColdPage&, const ColdBin&) { return true; },
      [&](const ColdRecord& record) {
        if (!found.insert(record.id()).second) return;
        const uint8_t* at = record.packed() - ColdRecord::kHead;
        records.insert(records.end(), at, at + group.cold->record_bytes());
      });
}

// Lock a bucket whose rows on disk have been read.
std::pair<Store::ColdScan, std::unique_lock<SpinLock>> Store::lock_scanned(uint32_t bucket) {
  if (!cold_) return {ColdScan{}, std::unique_lock(states_[bucket].lock)};
  for (Retry retry(*cold_);; retry.again()) {
    ColdScan scan;
    std::vector<uint32_t> versions;
    for (const auto& group : groups_) versions.push_back(copy_cold(*group, bucket, scan.records.emplace_back()));
    std::unique_lock lock(states_[bucket].lock);
    bool current = true;
    for (size_t g = 0; g < groups_.size(); g++) current &= versions[g] == groups_[g]->cold->bin(bucket).version;
    if (current) return {std::move(scan), std::move(lock)};
  }
}

// Lock a bucket with all rows in memory that a flush must take.
std::unique_lock<SpinLock> Store::lock_brought(uint32_t bucket, bool all) {
  std::unique_lock lock(states_[bucket].lock);
  if (!cold_) return lock;
  for (Retry retry(*cold_); !is_brought(bucket, all);) {
    lock.unlock();
    retry.again();
    for (const auto& group : groups_) bring(*group, bucket, all);
    lock.lock();
  }
  return lock;
}

// Under the bucket's lock: whether a flush can take all that it must.
bool Store::is_brought(uint32_t bucket, bool all) const {
  for (const auto& group : groups_) {
    const ColdBin& bin = group->cold->bin(bucket);
    if (bin.dirty) return false;
    if (all && std::any_of(bin.rows.begin(), bin.rows.end(), [](uint32_t n) { return n > 0; })) return false;
  }
  return true;
}

}  // namespace freshet
