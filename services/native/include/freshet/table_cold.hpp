// Rows of a store group that are not in memory: pages on a local disk, and a directory of them in memory.
//
// A bucket's rows lie in pages of some 40 rows: base pages and a short log. A row of the base is in one of two pages
// that its hash names, the emptier one when it was written, so pages fill to nine tenths (two choices: Azar et al.
// 1999). There is no entry a row: 48 bytes a page, 32 of which are a Bloom filter of its keys, by which nearly all keys
// without a row on disk are known without reading. Rows that leave memory are appended to the log, whose rows have an
// entry of 2 bytes each; once it has a quarter of the base's rows, both are merged into a new base, in a few large
// transfers. So a row that leaves is written some six times, and moving it costs a small part of a transfer (Kangaroo,
// McAllister et al. 2021, has such a log before pages that are rewritten one by one).
//
// A row may have several records: the one in the latest page of the log counts, then the base's. One that is also in
// memory is out of date on disk. Pages are never written in place, and only by the thread that moves rows to disk. All
// else here is guarded by the bucket's lock (see store.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "freshet/cold_file.hpp"
#include "freshet/optim.hpp"

namespace freshet {

struct RowId {
  uint64_t key;
  uint8_t table;
  bool operator==(const RowId&) const = default;
};
struct RowIdHash {
  size_t operator()(const RowId& id) const { return static_cast<size_t>(id.key * 0x9e3779b97f4a7c15ull + id.table); }
};
using RowIds = std::unordered_set<RowId, RowIdHash>;

struct ColdPage {
  std::array<uint64_t, 4> filter{};
  uint32_t number = ColdFile::kNone;  // in the file
  uint32_t rows = 0;
  uint32_t dirty_epoch = 0;  // the flush for which it holds changed rows, if it is the bucket's next one
  bool dirty = false;
  uint16_t sum = 0;  // of its checksum: a page that the disk did not write, or wrote elsewhere, is not taken for it
};

// A bucket's part.
struct ColdBin {
  std::vector<ColdPage> base;
  std::vector<ColdPage> log;             // the latest last
  std::vector<uint16_t> index;           // of the log: 8 bits of a row's hash, and its page + 1; 0: free
  uint32_t base_rows = 0, log_rows = 0;  // with those that are out of date
  uint32_t version = 1;                  // another whenever a row has left memory; never 0
  uint32_t merges = 0;                   // how many times all pages were replaced
  uint32_t epoch = 0;                    // flushes that took the bucket's changed rows
  uint32_t dirty = 0;                    // rows on disk alone that the next flush must take
  std::vector<int64_t> rows;             // on disk alone, of each of the group's tables
  RowIds erased;         // removed, and perhaps still on a page; such a key's row stays in memory until a merge
  bool damaged = false;  // of a serving store: no row moves to its pages any more
  RowIds fetched, fetched_before;  // of a serving store: in this period, and in the last; they stay in memory
  uint32_t period = 0;
  void begin(uint32_t now) {
    if (now == period) return;
    fetched_before.clear();
    if (now == period + 1) fetched_before.swap(fetched);
    fetched.clear();
    period = now;
  }
  bool fetched_lately(const RowId& id) const { return fetched.contains(id) || fetched_before.contains(id); }
  bool empty() const { return base.empty() && log.empty(); }
  void next_version() {
    if (++version == 0) version = 1;
  }
};

// A row on a page: key, stamp and packed row (RowLayout::pack). The stamp is of the moment at which it was written; a
// flush since then has stored the row.
class ColdRecord {
 public:
  static constexpr uint32_t kHead = 12;
  explicit ColdRecord(const uint8_t* at) : at_(at) {}
  uint64_t key() const { return load<uint64_t>(0); }
  uint8_t table() const { return at_[kHead]; }
  RowId id() const { return {key(), table()}; }
  bool dirty(uint32_t epoch) const { return stamp() == ((epoch << 2) | 1u) || stamp() == ((epoch << 2) | 3u); }
  bool stored(uint32_t epoch) const { return (stamp() & 2u) || ((stamp() & 1u) && !dirty(epoch)); }
  uint32_t steps() const { return load<uint32_t>(kHead) >> meta::kCountShift; }
  uint32_t touched() const { return load<uint32_t>(kHead + 4); }
  const uint8_t* packed() const { return at_ + kHead; }
  static void write(uint8_t* at, uint64_t key, bool dirty, bool stored, uint32_t epoch);

 private:
  template <typename T>
  T load(size_t at) const {
    T value;
    __builtin_memcpy(&value, at_ + at, sizeof value);
    return value;
  }
  uint32_t stamp() const { return load<uint32_t>(8); }
  const uint8_t* at_;
};

class ColdRows {
 public:
  // Throws ColdFault as ColdFile does.
  ColdRows(const std::string& folder, std::shared_ptr<DiskBudget> budget, uint32_t packed_bytes, size_t tables,
           uint32_t buckets);

  ColdFile file;
  std::atomic<bool> full{false};  // no pages were left for rows that would leave memory
  ColdBin& bin(uint32_t bucket) { return bins_[bucket]; }
  uint32_t record_bytes() const { return record_bytes_; }
  uint32_t rows_of_page() const { return rows_of_page_; }
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }  // of memory

  // Pages that may hold the row, the latest first: those of the log, then at most two of the base; none for a key that
  // was erased. Returns how many are of the log.
  size_t pages_of(const ColdBin& bin, RowId id, std::vector<const ColdPage*>& pages) const;
  bool may_hold(const ColdBin& bin, RowId id) const;  // no, if it was erased
  // The base pages that may take the row.
  static std::pair<uint32_t, uint32_t> homes(RowId id, size_t pages);

  // Whether a page that was read is as some page was written, and whether it is the page of this bucket with that sum.
  bool is_whole(const uint8_t* page) const;
  uint32_t bucket_of(const uint8_t* page) const;
  static uint16_t sum_of(const uint8_t* page);
  bool sound(const uint8_t* page, uint32_t bucket, uint16_t sum) const {
    return is_whole(page) && bucket_of(page) == bucket && sum_of(page) == sum;
  }
  uint32_t rows_in(const uint8_t* page) const;
  ColdRecord record(const uint8_t* page, uint32_t i) const {
    return ColdRecord(page + kPageHead + static_cast<size_t>(i) * record_bytes_);
  }
  // Its record on the page, or nullptr.
  const uint8_t* find(const uint8_t* page, RowId id) const;

  // A page as it is put together.
  class Builder {
   public:
    Builder(const ColdRows& cold, uint32_t bucket, uint8_t* page);
    bool full() const { return page.rows == cold_.rows_of_page_; }
    void add(const uint8_t* record, uint32_t epoch);
    void seal();
    ColdPage page;

   private:
    const ColdRows& cold_;
    uint8_t* at_;
  };

  size_t base_pages_for(size_t rows) const;
  // Pages that the merge of any bucket needs before it frees that bucket's old ones. If other pages took these, no
  // merge would be possible any more, and pages of rows that are out of date or removed would stay for ever.
  size_t pages_of_merge() const { return most_base_ + most_base_ / 2 + 8; }
  // Rows that the log may have before it is merged.
  size_t log_limit(const ColdBin& bin) const {
    return std::clamp<size_t>(bin.base_rows / 4, 64, size_t{kMostLogPages} * rows_of_page_);
  }
  static constexpr size_t kMostLogPages = 255;
  // Append a page that is written to the log.
  void append(ColdBin& bin, const ColdPage& page, const RowId* ids, size_t n);
  // These pages take the place of all others; `dropped` were erased, and have no record any more.
  void replace(ColdBin& bin, std::vector<ColdPage> base, const RowIds& dropped);
  void erase(ColdBin& bin, RowId id);

  void clear(ColdBin& bin);

 private:
  static constexpr size_t kPageHead = 16;  // checksum, rows, bucket
  static bool in_filter(const ColdPage& page, uint64_t h);
  static size_t bytes_of(const ColdBin& bin);
  void release(const ColdBin& bin);
  template <typename Change>
  void counted(ColdBin& bin, Change change);  // keeps `bytes_`

  uint32_t record_bytes_, rows_of_page_;
  std::atomic<size_t> bytes_{0};
  size_t most_base_ = 0;  // pages of the largest base so far; the moving thread's
  double fullest_;
  std::vector<ColdBin> bins_;
};

}  // namespace freshet
