// All store groups of one shard of a model: rows, optimiser state and applied offsets, changed together under one lock
// a bucket (PROTOCOL 4). Thread-safe. Each call takes whole batches and runs on the caller's thread.
//
// Locks, outer first: partitions, rising (a push holds its own, so that its check still holds when it applies; who changes
// which buckets are held takes all of them) | one bucket | the arenas'. No call holds two buckets.
#pragma once

#include <array>
#include <atomic>
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
  std::vector<u8> tables;
  std::vector<SlotSpec> slots;
  bool half = false;  // the last slot's values are bf16
};

struct TableSpec {
  u8 id = 0;
  i64 ttl_ms = 0;   // 0: kept
  i64 max_rows = 0;  // 0: unbounded
  u32 admission = 1;
};

struct StoreSpec {
  std::vector<GroupSpec> groups;
  std::vector<TableSpec> tables;
  u32 buckets = 1024;
  u32 partitions = 1;
  u64 seed = 0;
  bool serving = false;  // values only: no optimiser state, no pushes
  bool held = true;      // every bucket from the start; else none until set_applied
  std::array<bool, consumers> consumed{true, true};  // by publish, by flush
};

// Unique keys of a batch in one group, in order of their buckets.
struct Keys {
  const u64* keys = nullptr;
  const u8* tables = nullptr;
  size_t n = 0;
  const u32* bucket_starts = nullptr;  // (buckets + 1,)
};

struct PushGroup {
  u32 group = 0;
  Keys keys;
  const float* gradients = nullptr;  // (n, S)
};

enum class Pushed : int { applied, skipped, refused, unread };  // unread: rows must be read first, nothing was touched

// Why a lookup has no answer: its bucket is not held, or is being loaded and the row must be read first.
struct Missing {
  u32 bucket;
  bool unread;
};

// Keys of buckets that are being loaded, about which memory knows nothing yet: (n,) each.
struct Unread {
  std::vector<i64> buckets, fences;
  std::vector<u64> keys;
  std::vector<u8> tables;
};

struct Counts {
  i64 created = 0, evicted = 0, not_finite = 0, not_admitted = 0;
};

struct Removal {
  u64 key;
  u8 table;
};
struct FlushBatch {
  std::vector<u32> buckets;
  std::vector<i64> applied;  // (n, partitions)
  std::vector<i64> clock_ms;
  std::vector<i64> rows;  // stored once this flush is
  RunColumns runs;        // those of a bucket end to end, in the order of `buckets`
};
struct PublishedTable {
  u8 table = 0;
  u32 width = 0;
  Column<u64> keys;  // rising buckets
  Column<float> values;
  Column<u64> removed;
};
struct UnpackedTable {
  u8 table = 0;
  u32 width = 0;
  Column<u64> keys;  // in order of their buckets
  Column<float> values;
  Column<u32> touched;
};
struct PublishBatch {
  std::vector<PublishedTable> tables;
  i64 clock_ms = 0;
  i64 pending = 0;  // rows still to be published
};
struct Evicted {
  i64 examined = 0, evicted = 0;
  bool finished = false;
};

class SpinLock {
 public:
  void lock() {
    for (u32 tries = 0; held_.exchange(true, std::memory_order_acquire);) {
      while (held_.load(std::memory_order_relaxed)) {
        spin_pause();
        if (++tries > spins) std::this_thread::yield();  // the holder may have lost its core
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  // 5 to 20 us, some times as long as a bucket is usually held: who yields may lose its core for milliseconds to a thread
  // that is not in a hurry, and a lane is waited for by the others.
  static constexpr u32 spins = 512;
  std::atomic<bool> held_{false};
};

class Store {
 public:
  explicit Store(StoreSpec spec);

  // --- rows of a batch (store.cpp)
  // Write each key's floats to `out` (n, S). Absent rows: initial values and, if the table admits them, a new row when
  // `create`; zeros otherwise. Returns a bucket that cannot answer, if any key needed it (then `out` is unfinished).
  // touched: (n,) seconds at which each row was last touched before, 0 for an absent one; null: not asked.
  // states: (n, T) optimiser state, of an absent row what a new one starts with, or zeros likewise; null: not asked.
  // known_pushes: (buckets, partitions) what each bucket with keys had applied as its rows were read; null: not asked.
  std::optional<Missing> lookup(u32 group, const Keys& keys, float* out, bool create, u8* found, u32* touched = nullptr,
                                float* states = nullptr, i64* known_pushes = nullptr);
  // Apply gradients with the (n, 3) ranges partition, start, stop that they stand for. Every bucket is checked before any
  // is touched. Running out of memory in the middle ends the process: half a push must never be flushed.
  // owned: (buckets,) which are meant, all of which must be held; null: those that are held. No others are touched.
  Pushed push(const i64* ranges, size_t n, i64 clock_ms, const std::vector<PushGroup>& groups, const u8* owned = nullptr);

  // --- buckets
  void set_applied(u32 bucket, const i64* offsets, i64 clock_ms);  // and hold the bucket
  void applied_of(u32 bucket, i64* offsets) const;
  i64 clock_of(u32 bucket) const;
  std::vector<std::set<i64>> applied() const;  // of each partition, over held buckets
  bool held(u32 bucket) const;
  std::vector<u32> held() const;  // rising
  void drop_bucket(u32 bucket);

  // --- buckets that answer while they are loaded (store_loading.cpp)
  // They are held, but an absent row is only taken for absent once that is known: `settle` says so of keys, `finish_loading`
  // of the bucket. They are neither flushed nor evicted from. `fence`: of the claim that they are loaded under; what was read
  // under another one is left alone.
  void begin_loading(u32 bucket, const i64* offsets, i64 clock_ms, i64 fence);
  Unread unread(const std::vector<std::pair<u32, Keys>>& groups) const;
  // Rows of which nothing is known here; those that are here may have learned since. Checked as by `import_runs`.
  void import_unread(const RunsView& runs, i64 fence);
  // Keys that the row store does not have: those that are not here either are absent from now on.
  void settle(const i64* buckets, const u8* tables, const u64* keys, size_t n, i64 fence);
  bool finish_loading(u32 bucket, i64 fence);  // false: it is not being loaded under this fence any more

  // --- flush and publish (store_collect.cpp)
  // Buckets rise; their runs are then a directory. One that is not held, as it may
  // have been dropped meanwhile, or is still being loaded is left out.
  FlushBatch collect_flush(const std::vector<u32>& buckets, bool whole);
  // Buckets in turn, and how many have been left with nothing to publish since the store was made: once that has grown by
  // all buckets, every row that was marked before has been collected.
  PublishBatch collect_publish(i64 max_rows);
  i64 drained() const { return drained_.load(std::memory_order_relaxed); }
  // A publish failed: rows that are there are dirty again; `removed` will be reported again.
  void put_back_published(u8 table, const u64* keys, size_t n, const u64* removed, size_t n_removed);
  i64 pending(u32 consumer) const { return std::max<i64>(0, pending_[consumer].load(std::memory_order_relaxed)); }

  // --- runs of packed rows (store_runs.cpp)
  // Checked before any is taken, but for checksums: std::invalid_argument says which row is wrong and why.
  void import_runs(const RunsView& runs);
  // Values of packed rows, table by table, for a serving store to take; nothing is stored here.
  std::vector<UnpackedTable> unpack_runs(const RunsView& runs) const;
  RecordWidths packed_widths() const;

  // --- rows by key, in any order (store_rows.cpp)
  // Packed rows as the row store has them. Checked before any is taken: std::invalid_argument says which is wrong and why.
  void import_rows(u8 table, const u64* keys, const u8* records, size_t n, size_t record_bytes);
  void export_rows(u8 table, const u64* keys, size_t n, u8* records, u8* found) const;
  // Values (n, S) of a serving table; `only_absent` leaves rows alone that are there (PROTOCOL 17). Returns rows written.
  // They are touched at `clock_ms`, which lookups then touch rows at too, or each at its own of `touched` (n,) seconds.
  i64 import_values(u8 table, const u64* keys, const float* values, size_t n, bool only_absent, i64 clock_ms,
                    const u32* touched = nullptr);
  i64 remove(u8 table, const u64* keys, size_t n);

  // --- eviction (store_evict.cpp)
  // Examine up to `budget` rows more, buckets in turn: by age, then by the least recently used down to a table's
  // max_rows. Rows not flushed stay, and those of buckets that are not held or still loaded. `finished` when a round over all buckets is complete.
  Evicted evict(i64 now_ms, i64 budget);

  u32 buckets() const { return spec_.buckets; }
  u32 partitions() const { return spec_.partitions; }
  u32 group_of(u8 table) const;  // throws std::invalid_argument
  size_t groups() const { return groups_.size(); }
  const RowLayout& layout(u32 group) const { return groups_.at(group)->layout; }
  const StoreSpec& spec() const { return spec_; }
  i64 rows(u8 table) const { return rows_[table].load(std::memory_order_relaxed); }
  i64 evicted(u8 table) const { return evicted_of_[table].load(std::memory_order_relaxed); }  // since the store was made
  size_t bytes() const;
  Counts counts() const;

 private:
  struct Loading {
    i64 fence;
    std::set<std::pair<u64, u8>> absent;  // keys that the row store does not have
  };
  struct alignas(64) BucketState {
    SpinLock lock;  // what each push and lookup looks at stands in one line
    bool held = true;
    i64 clock_ms = 0;  // of the last push that had keys of the bucket, or as it was held; see `clock_at`
    std::unique_ptr<Loading> loading;  // while it is loaded
    std::vector<Removal> removed[consumers];
  };
  static constexpr int no_group = -1;
  static constexpr size_t piece = 32;  // rows that are stepped at a time
  // Buckets, or keys, ahead of the one at hand whose lock is asked for: another lane has had its line last.
  static constexpr size_t locks_ahead = 24;

  // How far a bucket has applied a partition. Written under the partition's lock and, but for a push without keys of the bucket,
  // under the bucket's: most pushes have keys of some buckets only, and a lock that another lane has held last costs as much as
  // a row.
  struct Applied {
    std::atomic<i64> offset{0}, clock_ms{0};
    void set(i64 to, i64 at_ms) {
      offset.store(to, std::memory_order_relaxed);
      clock_ms.store(at_ms, std::memory_order_relaxed);
    }
  };
  Applied& applied_at(i64 partition, u32 bucket) const {
    return applied_[static_cast<size_t>(partition) * spec_.buckets + bucket];
  }
  i64 offset_at(i64 partition, u32 bucket) const { return applied_at(partition, bucket).offset.load(std::memory_order_relaxed); }
  i64 clock_at(u32 bucket) const;

  u32 bucket_of(u64 key) const { return static_cast<u32>(key >> shift_); }
  // Under the bucket's lock: whether it is known if there is such a row.
  bool known(const BucketState& state, const Group& group, u32 bucket, u64 key, u8 table) const {
    return !state.loading || group.find(group.bin(bucket), key, table) != Group::none ||
           state.loading->absent.contains({key, table});
  }
  std::optional<u32> unread_bucket(u32 group, const Keys& keys) const;
  void hold(BucketState& state, u32 bucket, const i64* offsets, i64 clock_ms);
  void end_loading(BucketState& state);
  void check_keys(u32 group, const Keys& keys) const;
  void check_bucket(u32 bucket) const;
  std::vector<std::unique_lock<std::mutex>> no_pushes();
  void touch(Header& row, u32 now_s) const {
    if (row.touched < now_s) row.touched = now_s;
  }
  u32 create_row(Group& group, u32 bucket, u64 key, u8 table);
  i64 mark(Bin& bin, Header& row, u32 slot, u32 consumer);
  u32 slot_for_step(Group& group, u32 bucket, u64 key, u8 table, Counts& count);
  // What a push has done so far, added to the store's counters once: each is shared with the other lanes.
  struct Stepped {
    Counts counts;
    i64 listed[consumers] = {};
  };
  void apply_run(const PushGroup& push, Ahead& ahead, u32 bucket, u32 now_s, Stepped& sum) noexcept;
  void count(const Stepped& sum);
  void forget(Group& group, u32 bucket, u32 slot, bool& relist);
  bool changed(const Header& row) const;
  class Taker;  // copies a bucket's changed rows out as runs
  void check_runs(const RunsView& runs) const;
  void import_row(Group& group, u32 bucket, u64 key, u8 table, const u8* record);
  template <typename Visit>
  void each_bucket_run(const u64* keys, size_t n, Visit visit) const;
  void count_ages(u32 bucket);
  void choose_oldest();
  i64 evict_bucket(u32 bucket);

  StoreSpec spec_;
  u32 shift_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::array<int, 256> group_of_table_;
  std::array<TableSpec, 256> table_spec_;
  std::array<std::unique_ptr<Admission>, 256> admission_;
  mutable std::vector<BucketState> states_;
  std::unique_ptr<Applied[]> applied_;  // (partitions, buckets)
  std::vector<u8> held_;      // (buckets,) as their states say; changed while no push is under way, so pushes read it
  std::unique_ptr<std::mutex[]> partition_locks_;
  std::array<std::atomic<i64>, 256> rows_{}, evicted_of_{};
  std::array<std::atomic<i64>, consumers> pending_{};
  std::atomic<i64> clock_ms_{0}, created_{0}, evicted_{0}, not_finite_{0}, not_admitted_{0}, drained_{0};
  std::atomic<u32> loading_{0};  // buckets
  std::mutex publish_lock_;
  u32 publish_cursor_ = 0;

  struct Round;  // of eviction, over all buckets
  struct RoundDeleter {
    void operator()(Round*) const;
  };
  std::mutex evict_lock_;
  std::unique_ptr<Round, RoundDeleter> round_;
};

// Event time as rows keep it: whole seconds, good until 2106.
inline u32 seconds(i64 ms) { return static_cast<u32>(std::min<i64>(std::max<i64>(ms, 0) / 1000, 0xffffffff)); }

}  // namespace freshet
