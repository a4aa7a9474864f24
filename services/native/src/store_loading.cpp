// Buckets that answer while their rows are read: absent from memory is not absent from the row store (PROTOCOL 10 and
// 13).
#include <algorithm>
#include <stdexcept>

#include "freshet/store.hpp"

namespace freshet {

namespace {

// Rows taken under one hold of a bucket's lock, for which lookups wait: some 50 us.
constexpr uint32_t kTakenAtOnce = 256;

}  // namespace

std::optional<uint32_t> Store::unread_bucket(uint32_t index, const Keys& keys) const {
  if (loading_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const Group& group = *groups_[index];
  for (size_t i = 0; i < keys.n;) {
    const uint32_t bucket = bucket_of(keys.keys[i]);
    const size_t end = keys.bucket_starts[bucket + 1];
    const std::lock_guard lock(states_[bucket].lock);
    for (; i < end; i++)
      if (!known(states_[bucket], group, bucket, keys.keys[i], keys.tables[i])) return bucket;
  }
  return std::nullopt;
}

void Store::begin_loading(uint32_t bucket, const int64_t* offsets, int64_t clock_ms, int64_t fence) {
  check_bucket(bucket);
  if (spec_.serving) throw std::invalid_argument("a serving store is not loaded: it takes values");
  const auto pushes = no_pushes();
  BucketState& state = states_[bucket];
  const std::lock_guard lock(state.lock);
  for (const auto& group : groups_)
    if (group->bin(bucket).rows || (group->cold && !group->cold->bin(bucket).empty()))
      throw std::invalid_argument("a bucket that is loaded must be empty: drop it first");
  end_loading(state);
  state.loading = std::make_unique<Loading>(Loading{fence, {}});
  loading_.fetch_add(1, std::memory_order_relaxed);
  hold(state, bucket, offsets, clock_ms);
}

// Under the bucket's lock.
void Store::end_loading(BucketState& state) {
  if (!state.loading) return;
  state.loading.reset();
  loading_.fetch_sub(1, std::memory_order_relaxed);
}

bool Store::finish_loading(uint32_t bucket, int64_t fence) {
  check_bucket(bucket);
  BucketState& state = states_[bucket];
  const std::lock_guard lock(state.lock);
  if (!state.loading || state.loading->fence != fence) return false;
  end_loading(state);
  return true;
}

Unread Store::unread(const std::vector<std::pair<uint32_t, Keys>>& groups) const {
  Unread out;
  for (const auto& [index, keys] : groups) check_keys(index, keys);
  for (const auto& [index, keys] : groups) {
    const Group& group = *groups_[index];
    for (size_t i = 0; i < keys.n;) {
      const uint32_t bucket = bucket_of(keys.keys[i]);
      const size_t end = keys.bucket_starts[bucket + 1];
      BucketState& state = states_[bucket];
      const std::lock_guard lock(state.lock);
      for (; i < end; i++) {
        if (known(state, group, bucket, keys.keys[i], keys.tables[i])) continue;
        // A push may name a row several times, one behind the other; it is read once.
        if (i && keys.keys[i] == keys.keys[i - 1] && keys.tables[i] == keys.tables[i - 1]) continue;
        out.buckets.push_back(bucket);
        out.fences.push_back(state.loading->fence);
        out.keys.push_back(keys.keys[i]);
        out.tables.push_back(keys.tables[i]);
      }
    }
  }
  return out;
}

void Store::import_unread(const RunsView& runs, int64_t fence) {
  if (spec_.serving) throw std::invalid_argument("a serving store takes values, not packed rows: use import_values");
  check_runs(runs);
  for (const RunEntry& run : runs.directory) {
    const uint8_t table = static_cast<uint8_t>(run.table);
    Group& group = *groups_[group_of(table)];
    const uint32_t packed = group.layout.packed_bytes();
    const uint8_t *keys = runs.of(run), *records = keys + run.keys_bytes();
    BucketState& state = states_[run.bucket];
    if (cold_) wait_for_room();
    for (uint32_t first = 0; first < run.rows; first += kTakenAtOnce) {
      const std::lock_guard lock(state.lock);
      if (!state.loading || state.loading->fence != fence) break;
      for (uint32_t i = first; i < std::min(run.rows, first + kTakenAtOnce); i++)
        if (const uint64_t key = load_key(keys, i); !known(state, group, run.bucket, key, table))
          import_row(group, run.bucket, key, table, records + size_t{i} * packed);
    }
  }
}

void Store::settle(const int64_t* buckets, const uint8_t* tables, const uint64_t* keys, size_t n, int64_t fence) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t bucket = bucket_of(keys[i]);
    if (bucket != buckets[i]) throw std::invalid_argument("a key is of another bucket");
    const Group& group = *groups_[group_of(tables[i])];
    BucketState& state = states_[bucket];
    const std::lock_guard lock(state.lock);
    if (!state.loading || state.loading->fence != fence) continue;
    if (group.find(group.bin(bucket), keys[i], tables[i]) == Group::kNone)
      state.loading->absent.insert({keys[i], tables[i]});
  }
}

}  // namespace freshet
