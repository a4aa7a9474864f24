// All store groups of one shard of a model: rows, optimiser state and applied offsets, changed together under one lock
// a bucket (PROTOCOL 4). Thread-safe. Each call takes whole batches and runs on the caller's thread.
//
// Locks, outer first: partitions, rising (a push holds its own, so that its check still holds when it applies; who
// changes which buckets are held takes all of them) | one bucket | the arenas'. No call holds two buckets.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "freshet/runs.hpp"
#include "freshet/table.hpp"
#include "freshet/table_admission.hpp"
#include "freshet/table_ahead.hpp"
#include "freshet/table_column.hpp"

namespace freshet {

struct GroupSpec {
  std::vector<uint8_t> tables;
  std::vector<SlotSpec> slots;
  bool half = false;  // the last slot's values are bf16
};

struct TableSpec {
  uint8_t id = 0;
  int64_t ttl_ms = 0;    // 0: kept
  int64_t max_rows = 0;  // 0: unbounded
  uint32_t admission = 1;
};

struct StoreSpec {
  std::vector<GroupSpec> groups;
  std::vector<TableSpec> tables;
  uint32_t buckets = 1024;
  uint32_t partitions = 1;
  uint64_t seed = 0;
  bool serving = false;                               // values only: no optimiser state, no pushes
  bool held = true;                                   // every bucket from the start; else none until set_applied
  std::array<bool, kConsumers> consumed{true, true};  // by publish, by flush
};

// Keys of a batch in one group, in order of their buckets: unique in a lookup, repeated in a push of several steps.
struct Keys {
  const uint64_t* keys = nullptr;
  const uint8_t* tables = nullptr;
  size_t n = 0;
  const uint32_t* bucket_starts = nullptr;  // (buckets + 1,)
};

struct PushGroup {
  uint32_t group = 0;
  Keys keys;
  const float* gradients = nullptr;  // (n, S)
};

enum class Pushed : int { applied, skipped, refused, unread };  // unread: rows must be read first, nothing was touched

// What a lookup finds of a key. kPerhapsOnDisk: of a serving store alone; the others are certain.
enum Found : uint8_t { kAbsent, kHere, kPerhapsOnDisk };

// Why a lookup has no answer: its bucket is not held, or is being loaded and the row must be read first.
struct Missing {
  uint32_t bucket;
  bool unread;
};

// Keys of loading buckets that are neither in memory nor known to be absent: (n,) each.
struct Unread {
  std::vector<int64_t> buckets, fences;
  std::vector<uint64_t> keys;
  std::vector<uint8_t> tables;
};

// Rows on disk. folder: on a local disk. memory_bytes: of rows, indexes and directory, beyond which rows go to disk.
// disk_bytes: most of the files; 0: as much as the disk has.
struct ColdSpec {
  std::string folder;
  size_t memory_bytes = 0, disk_bytes = 0;
  // A row that a request has fetched stays for one period at least, two at most: the request looks it up meanwhile.
  std::chrono::milliseconds fetched_period{100};
};
struct ColdCounts {
  int64_t rows = 0;  // on disk alone
  int64_t fetched = 0, spilled = 0, pages_read = 0, pages_written = 0, waits = 0;
  int64_t bytes_in_use = 0, bytes_on_disk = 0;
  bool full = false;  // the disk, or disk_bytes, is
};

struct Counts {
  int64_t created = 0, evicted = 0, not_finite = 0, not_admitted = 0;
};

struct Removal {
  uint64_t key;
  uint8_t table;
};
struct FlushBatch {
  std::vector<uint32_t> buckets;
  std::vector<int64_t> applied;  // (n, partitions)
  std::vector<int64_t> clock_ms;
  std::vector<int64_t> rows;  // stored once this flush is
  RunColumns runs;            // those of a bucket end to end, in the order of `buckets`
};
struct PublishedTable {
  uint8_t table = 0;
  uint32_t width = 0;
  Column<uint64_t> keys;  // rising buckets
  Column<float> values;
  Column<uint64_t> removed;
};
struct UnpackedTable {
  uint8_t table = 0;
  uint32_t width = 0;
  Column<uint64_t> keys;  // in order of their buckets
  Column<float> values;
  Column<uint32_t> touched;
};
struct PublishBatch {
  std::vector<PublishedTable> tables;
  int64_t clock_ms = 0;
  int64_t pending = 0;  // rows still to be published
  int64_t passed = 0;   // changed rows that serving holds nearly, and are left out
};
struct Evicted {
  int64_t examined = 0, evicted = 0;
  bool finished = false;
};

class SpinLock {
 public:
  void lock() {
    for (uint32_t tries = 0; held_.exchange(true, std::memory_order_acquire);) {
      while (held_.load(std::memory_order_relaxed)) {
        spin_pause();
        if (++tries > kSpins) std::this_thread::yield();  // the holder may have lost its core
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  // 5 to 20 us, a few times as long as a bucket is usually held. A thread that yields may lose its core for
  // milliseconds to one of less urgency, and the other lanes wait for a lane.
  static constexpr uint32_t kSpins = 512;
  std::atomic<bool> held_{false};
};

class Store {
 public:
  explicit Store(StoreSpec spec);
  ~Store() { free_rows(); }
  // Free all rows, as the destructor does, which alone may follow.
  void free_rows();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // --- rows of a batch (store.cpp)
  // Write each key's floats to `out` (n, S). Absent rows: initial values and, if the table admits them, a new row when
  // `create`; zeros otherwise. Returns a bucket that cannot answer, if any key needed it (then `out` is unfinished).
  // found: (n,) of Found; may be null, as may the next three, unless rows of a serving store are on disk: it reads no
  // page in a lookup, and a row that may be on disk counts as absent until `fetch` has brought it.
  // touched: (n,) seconds at which each row was last touched before, 0 for an absent one.
  // states: (n, T) optimiser state; for an absent row that of a new one, or zeros likewise.
  // known_pushes: (buckets, partitions) the applied offsets of each bucket with keys when its rows were read.
  std::optional<Missing> lookup(uint32_t group, const Keys& keys, float* out, bool create, uint8_t* found,
                                uint32_t* touched = nullptr, float* states = nullptr, int64_t* known_pushes = nullptr);
  // Apply gradients with their (n, 3) ranges: partition, start, stop. Every bucket is checked before
  // any is touched. Running out of memory in the middle ends the process: half a push must never be flushed. owned:
  // (buckets,) which are meant, all of which must be held; null: those that are held. No others are touched.
  Pushed push(const int64_t* ranges, size_t n, int64_t clock_ms, const std::vector<PushGroup>& groups,
              const uint8_t* owned = nullptr);

  // --- buckets
  void set_applied(uint32_t bucket, const int64_t* offsets, int64_t clock_ms);  // and hold the bucket
  void applied_of(uint32_t bucket, int64_t* offsets) const;
  int64_t clock_of(uint32_t bucket) const;
  std::vector<std::set<int64_t>> applied() const;  // of each partition, over held buckets
  bool held(uint32_t bucket) const;
  std::vector<uint32_t> held() const;  // rising
  void drop_bucket(uint32_t bucket);

  // --- buckets that answer while they are loaded (store_loading.cpp)
  // They are held, but a row counts as absent only after `settle` has named its key or `finish_loading` its bucket.
  // They are neither flushed nor evicted from. `fence`: of the claim under which they are loaded; rows that were read
  // under another one are ignored.
  void begin_loading(uint32_t bucket, const int64_t* offsets, int64_t clock_ms, int64_t fence);
  Unread unread(const std::vector<std::pair<uint32_t, Keys>>& groups) const;
  // Import rows that are not here yet; those that are here may have learned since. Checked as by `import_runs`.
  void import_unread(const RunsView& runs, int64_t fence);
  // Keys that the row store does not have: those that are not here either are absent from now on.
  void settle(const int64_t* buckets, const uint8_t* tables, const uint64_t* keys, size_t n, int64_t fence);
  bool finish_loading(uint32_t bucket, int64_t fence);  // false: it is not being loaded under this fence any more

  // --- rows on disk (store_cold.cpp)
  // Called before there are rows. From then on a thread moves rows that have not been used of late to disk once memory
  // passes the limit, and calls bring the rows back that they need; of a serving store only `fetch` does, and it counts
  // rows (`rows`, ColdCounts) anew as pages are merged: in between a key of a delta that a page may hold counts as one
  // that it holds. Throws ColdFault; std::invalid_argument for a store that publishes rounded rows.
  void keep_cold(const ColdSpec& spec);
  // Bring the rows of keys of a later batch into memory. here: (n,) set to 1 where a row was found, there or in memory;
  // may be null. Throws ColdFault.
  void fetch(uint32_t group, const Keys& keys, uint8_t* here = nullptr);
  // Throws the first ColdFault that a thread has met, if any: rows on disk are not to be relied on any more.
  void check_cold() const;
  ColdCounts cold_counts() const;

  // --- flush and publish (store_collect.cpp)
  // Buckets rise; their runs are then a directory. One that is not held, as it may
  // have been dropped meanwhile, or is still being loaded is left out.
  FlushBatch collect_flush(const std::vector<uint32_t>& buckets, bool whole);
  // Buckets in turn, and how many have been left with nothing to publish since the store was made: once that has grown
  // by all buckets, every row that was marked before has been collected.
  PublishBatch collect_publish(int64_t max_rows);
  int64_t drained() const { return drained_.load(std::memory_order_relaxed); }
  // Published rows are rounded on their way to serving, to integers of 8 or 4 bits or to bf16 (16); called before there
  // are rows. With integers what serving holds is kept beside each row, and a changed row that serving holds nearly is
  // passed over (ServedRows::is_near). scalars: of each group, floats before the vector.
  void round_published(int bits, const std::vector<uint32_t>& scalars);
  // Rows that serving may hold otherwise: they were last published rounded, or were read from the row store, which does
  // not know what their former owner has published. Buckets in turn, without rows that `collect_publish` has yet to
  // copy. The caller sends them as they are.
  PublishBatch collect_inexact(int64_t max_rows);
  int64_t inexact() const { return std::max<int64_t>(0, inexact_.load(std::memory_order_relaxed)); }
  // A publish failed: rows that are there are dirty again; `removed` will be reported again.
  void put_back_published(uint8_t table, const uint64_t* keys, size_t n, const uint64_t* removed, size_t n_removed);
  int64_t pending(uint32_t consumer) const {
    return std::max<int64_t>(0, pending_[consumer].load(std::memory_order_relaxed));
  }

  // --- runs of packed rows (store_runs.cpp)
  // Checked before any is taken, but for checksums: std::invalid_argument names the row and the fault.
  void import_runs(const RunsView& runs);
  // Values of packed rows, table by table, for a serving store to take; nothing is stored here.
  std::vector<UnpackedTable> unpack_runs(const RunsView& runs) const;
  RecordWidths packed_widths() const;

  // --- rows by key, in any order (store_rows.cpp)
  // Packed rows as the row store has them. Checked before any is taken: std::invalid_argument names the row and
  // why.
  void import_rows(uint8_t table, const uint64_t* keys, const uint8_t* records, size_t n, size_t record_bytes);
  void export_rows(uint8_t table, const uint64_t* keys, size_t n, uint8_t* records, uint8_t* found);
  // Values (n, S) of a serving table; none is read from disk. They are touched at `clock_ms`, which lookups then touch
  // rows at too, or each at its own of `touched` (n,) seconds.
  void import_values(uint8_t table, const uint64_t* keys, const float* values, size_t n, int64_t clock_ms,
                     const uint32_t* touched = nullptr);
  int64_t remove(uint8_t table, const uint64_t* keys, size_t n);

  // --- eviction (store_evict.cpp)
  // Examine up to `budget` rows more, buckets in turn: by age, then by the least recently used down to a table's
  // max_rows. Rows not flushed stay, and those of buckets that are not held or still loaded. `finished` when a round
  // over all buckets is complete. Throws ColdFault if rows on disk could not be read or written.
  Evicted evict(int64_t now_ms, int64_t budget);

  uint32_t buckets() const { return spec_.buckets; }
  uint32_t partitions() const { return spec_.partitions; }
  uint32_t group_of(uint8_t table) const;  // throws std::invalid_argument
  size_t groups() const { return groups_.size(); }
  uint32_t row_bytes(uint32_t group) const { return groups_.at(group)->row_bytes(); }  // in memory
  const RowLayout& layout(uint32_t group) const { return groups_.at(group)->layout; }
  const StoreSpec& spec() const { return spec_; }
  int64_t rows(uint8_t table) const { return std::max<int64_t>(0, rows_[table].load(std::memory_order_relaxed)); }
  int64_t evicted(uint8_t table) const {
    return evicted_of_[table].load(std::memory_order_relaxed);
  }  // since the store was made
  size_t bytes() const;
  Counts counts() const;

 private:
  struct Loading {
    int64_t fence;
    std::set<std::pair<uint64_t, uint8_t>> absent;  // keys that the row store does not have
  };
  struct alignas(64) BucketState {
    SpinLock lock;  // the members that each push and lookup reads are in one cache line
    bool held = true;
    int64_t clock_ms = 0;  // of the last push that had keys of the bucket, or as it was held; see `clock_at`
    std::unique_ptr<Loading> loading;  // while it is loaded
    std::vector<Removal> removed[kConsumers];
  };
  static constexpr int kNoGroup = -1;
  static constexpr size_t kPiece = 32;  // rows that are stepped at a time
  // Locks are prefetched so many buckets, or keys, ahead: another lane has had their cache lines last.
  static constexpr size_t kLocksAhead = 24;

  // How far a bucket has applied a partition. Written under the partition's lock and, but for a push without keys of
  // the bucket, under the bucket's: most pushes have keys of some buckets only, and a lock that another lane has held
  // last costs as much as a row.
  struct Applied {
    std::atomic<int64_t> offset{0}, clock_ms{0};
    void set(int64_t to, int64_t at_ms) {
      offset.store(to, std::memory_order_relaxed);
      clock_ms.store(at_ms, std::memory_order_relaxed);
    }
  };
  Applied& applied_at(int64_t partition, uint32_t bucket) const {
    return applied_[static_cast<size_t>(partition) * spec_.buckets + bucket];
  }
  int64_t offset_at(int64_t partition, uint32_t bucket) const {
    return applied_at(partition, bucket).offset.load(std::memory_order_relaxed);
  }
  int64_t clock_at(uint32_t bucket) const;

  uint32_t bucket_of(uint64_t key) const { return static_cast<uint32_t>(key >> shift_); }
  // Under the bucket's lock: whether it is known if there is such a row.
  bool known(const BucketState& state, const Group& group, uint32_t bucket, uint64_t key, uint8_t table) const {
    return !state.loading || group.find(group.bin(bucket), key, table) != Group::kNone ||
           state.loading->absent.contains({key, table});
  }
  std::optional<uint32_t> unread_bucket(uint32_t group, const Keys& keys) const;
  void hold(BucketState& state, uint32_t bucket, const int64_t* offsets, int64_t clock_ms);
  void end_loading(BucketState& state);
  void check_keys(uint32_t group, const Keys& keys) const;
  void check_bucket(uint32_t bucket) const;
  std::vector<std::unique_lock<std::mutex>> no_pushes();
  void touch(Header& row, uint32_t now_s) const {
    if (row.touched < now_s) row.touched = now_s, row.meta &= ~meta::kOnDisk;
  }
  // Count a use; not the one for which the row has come from disk.
  void use(Header& row) const {
    const uint32_t come = spec_.serving ? meta::kFetched : meta::kOnDisk;
    if (row.meta & come) {
      if (spec_.serving) row.meta &= ~come;
    } else if ((row.meta >> meta::kHotShift & meta::kMostHot) < meta::kMostHot) {
      row.meta += 1u << meta::kHotShift;
    }
  }
  struct KeySpan {
    uint32_t bucket;
    size_t begin, end;         // of the keys
    uint32_t* seen = nullptr;  // set to the version of the bucket's rows on disk at which all are in memory or nowhere
    uint32_t version = 0, merges = 0;
    bool again = false, thorough = false;
  };
  // Keys of a batch whose rows have been fetched, and the version of each bucket's rows on disk at that time: while it
  // stays, a row that is not in memory does not exist. 0: the bucket has no keys.
  struct Fetched {
    uint32_t group;
    const Keys& keys;
    std::vector<uint32_t> seen;  // (buckets,), empty without rows on disk
  };
  // Lock a bucket whose rows of these keys are in memory or nowhere, and fetch those again that have left meanwhile.
  std::unique_lock<SpinLock> lock_fetched(uint32_t bucket, Fetched* parts, size_t n);
  std::unique_lock<SpinLock> lock_to_apply(uint32_t bucket, std::vector<Fetched>& parts) noexcept;
  std::unique_lock<SpinLock> lock_fetched(uint32_t bucket, uint8_t table, const uint64_t* keys, size_t n);
  std::vector<uint32_t> fetch_batch(uint32_t group, const Keys& keys, uint8_t* here = nullptr);
  void fetch_keys(uint8_t table, const uint64_t* keys, size_t n);
  void fetch_spans(Group& group, std::vector<KeySpan> spans, const uint64_t* keys, const uint8_t* tables,
                   bool one_table, uint8_t* here = nullptr);
  void read_pages(const ColdRows& cold, const std::vector<ColdFile::Transfer>& transfers);
  void take_cold(Group& group, uint32_t bucket, ColdRecord record);
  void bring(Group& group, uint32_t bucket, bool all);
  template <typename Choose, typename Visit>
  uint32_t each_record(Group& group, uint32_t bucket, Choose choose, Visit visit);
  uint32_t copy_cold(Group& group, uint32_t bucket, std::vector<uint8_t>& records);
  bool is_brought(uint32_t bucket, bool all) const;
  std::unique_lock<SpinLock> lock_brought(uint32_t bucket, bool all);
  // Records of a bucket's rows on disk, of each group one behind the other.
  struct ColdScan {
    std::vector<std::vector<uint8_t>> records;
  };
  std::pair<ColdScan, std::unique_lock<SpinLock>> lock_scanned(uint32_t bucket);
  bool is_full() const;
  void wait_for_room(bool briefly = false);
  void fail(const ColdFault& fault) const;
  ColdFault damaged(uint32_t page, uint32_t bucket) const;
  size_t hot_bytes() const;
  struct Spill;
  void plan_spill(Group& group, uint32_t bucket, size_t want, bool full, Spill& spill, size_t& gone);
  size_t spill(Group& group, uint32_t bucket, size_t want, bool full);
  size_t finish_spill(Group& group, uint32_t bucket, const Spill& spill,
                      const std::vector<ColdRows::Builder>& builders);
  void drop_to_disk(Group& group, uint32_t bucket, uint32_t slot, bool& relist);
  bool leaves_disk(Group& group, uint32_t bucket, RowId id);
  void recount_cold(Group& group, uint32_t bucket, const std::vector<int64_t>& written);
  void spill_loop();
  size_t spill_round();
  uint32_t create_row(Group& group, uint32_t bucket, uint64_t key, uint8_t table);
  int64_t mark(Bin& bin, Header& row, uint32_t slot, uint32_t consumer);
  void set_inexact(Bin& bin, Header& row);
  void clear_inexact(Bin& bin, Header& row);
  // Copy a row's values to the end of `out`, unless serving holds them nearly and `all` is false.
  bool copy_published(Group& group, uint32_t slot, PublishedTable& out, bool all);
  // Visit buckets from the cursor on, each under its lock, until the visits have taken `max_rows` rows.
  template <typename Visit>
  PublishBatch collect_in_turn(uint32_t& cursor, int64_t max_rows, Visit visit);
  uint32_t slot_for_step(Group& group, uint32_t bucket, uint64_t key, uint8_t table, Counts& count);
  // What a push has done so far, added to the store's counters once: each is shared with the other lanes.
  struct Stepped {
    Counts counts;
    int64_t listed[kConsumers] = {};
  };
  // Applies a push's gradients of one bucket, which the caller has locked.
  void apply_run(const PushGroup& push, Ahead& ahead, uint32_t bucket, uint32_t now_s, Stepped& sum) noexcept;
  void count(const Stepped& sum);
  void forget(Group& group, uint32_t bucket, uint32_t slot, bool& relist);
  bool changed(const Header& row) const;
  class Taker;  // copies a bucket's changed rows out as runs
  void check_runs(const RunsView& runs) const;
  void import_row(Group& group, uint32_t bucket, uint64_t key, uint8_t table, const uint8_t* record);
  template <typename Visit>
  void each_bucket_run(uint8_t table, const uint64_t* keys, size_t n, Visit visit);
  template <typename Visit>
  void each_cold(size_t g, uint32_t bucket, const ColdScan& scan, Visit visit);
  void count_ages(uint32_t bucket, const ColdScan& scan);
  void choose_oldest();
  bool is_old(uint8_t table, uint32_t touched);
  void forget_cold(Group& group, uint32_t bucket, const ColdRecord& record);
  int64_t evict_bucket(uint32_t bucket, const ColdScan& scan);

  StoreSpec spec_;
  uint32_t shift_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::array<int, 256> group_of_table_;
  std::array<TableSpec, 256> table_spec_;
  std::array<std::unique_ptr<Admission>, 256> admission_;
  mutable std::vector<BucketState> states_;
  std::unique_ptr<Applied[]> applied_;  // (partitions, buckets)
  std::vector<uint8_t> held_;  // (buckets,) as in their states; changed while no push is under way, so pushes read it
  std::unique_ptr<std::mutex[]> partition_locks_;
  std::array<std::atomic<int64_t>, 256> rows_{}, evicted_of_{};
  std::array<std::atomic<int64_t>, kConsumers> pending_{};
  std::atomic<int64_t> clock_ms_{0}, created_{0}, evicted_{0}, not_finite_{0}, not_admitted_{0}, drained_{0};
  std::atomic<uint32_t> loading_{0};  // buckets
  std::mutex publish_lock_;
  uint32_t publish_cursor_ = 0, inexact_cursor_ = 0;
  std::atomic<int64_t> inexact_{0};  // rows
  bool rounded_ = false;

  struct Cold;
  class Retry;
  struct ColdDeleter {
    void operator()(Cold*) const;
  };
  std::unique_ptr<Cold, ColdDeleter> cold_;  // null: all rows are in memory

  struct Round;  // of eviction, over all buckets
  struct RoundDeleter {
    void operator()(Round*) const;
  };
  std::mutex evict_lock_;
  std::unique_ptr<Round, RoundDeleter> round_;
};

// Event time as rows keep it: whole seconds, good until 2106.
inline uint32_t seconds(int64_t ms) {
  return static_cast<uint32_t>(std::min<int64_t>(std::max<int64_t>(ms, 0) / 1000, 0xffffffff));
}

}  // namespace freshet
