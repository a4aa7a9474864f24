#include "freshet/store.hpp"

#include <algorithm>
#include <bit>
#include <mutex>
#include <stdexcept>
#include <string>

namespace freshet {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

Store::Store(StoreSpec spec) : spec_(std::move(spec)), states_(spec_.buckets) {
  if (spec_.buckets < 2 || spec_.buckets > 65536 || !std::has_single_bit(spec_.buckets))
    refuse("expected a power of two from 2 to 65536 buckets, found " + std::to_string(spec_.buckets));
  if (spec_.partitions < 1 || spec_.partitions > 65536)
    refuse("expected 1 to 65536 partitions, found " + std::to_string(spec_.partitions));
  shift_ = 64u - static_cast<uint32_t>(std::countr_zero(spec_.buckets));
  group_of_table_.fill(kNoGroup);
  for (const GroupSpec& group : spec_.groups) {
    for (const uint8_t table : group.tables) {
      if (group_of_table_[table] != kNoGroup) refuse("table " + std::to_string(table) + " is in two store groups");
      group_of_table_[table] = static_cast<int>(groups_.size());
    }
    groups_.push_back(std::make_unique<Group>(group.slots, group.half, spec_.serving, group.tables, spec_.buckets));
  }
  for (const TableSpec& table : spec_.tables) {
    group_of(table.id);
    table_spec_[table.id] = table;
    if (table.admission > 1 && !spec_.serving)
      admission_[table.id] = std::make_unique<Admission>(table.admission, spec_.buckets);
  }
  if (spec_.serving) spec_.consumed = {false, false};
  for (BucketState& state : states_) state.held = spec_.held;
  held_.assign(spec_.buckets, spec_.held);
  applied_ = std::make_unique<Applied[]>(static_cast<size_t>(spec_.partitions) * spec_.buckets);
  partition_locks_ = std::make_unique<std::mutex[]>(spec_.partitions);
}

uint32_t Store::group_of(uint8_t table) const {
  if (group_of_table_[table] == kNoGroup) refuse("no store group holds table " + std::to_string(table));
  return static_cast<uint32_t>(group_of_table_[table]);
}

void Store::check_bucket(uint32_t bucket) const {
  if (bucket >= spec_.buckets)
    refuse("expected a bucket below " + std::to_string(spec_.buckets) + ", found " + std::to_string(bucket));
}

// A batch comes from a plan, or from the network: everything in it is checked.
void Store::check_keys(uint32_t group, const Keys& keys) const {
  if (group >= groups_.size())
    refuse("expected a store group below " + std::to_string(groups_.size()) + ", found " + std::to_string(group));
  const uint32_t* starts = keys.bucket_starts;
  bool rising = starts[0] == 0 && starts[spec_.buckets] == keys.n;
  for (uint32_t b = 0; b < spec_.buckets; b++) rising = rising && starts[b] <= starts[b + 1];
  if (!rising) refuse("bucket_starts must rise from 0 to the number of keys, " + std::to_string(keys.n));
  uint64_t wrong = 0;
  for (uint32_t i = 0; i < keys.n; i++) {
    const uint64_t b = keys.keys[i] >> shift_;
    wrong |= static_cast<uint64_t>(i < starts[b]) | static_cast<uint64_t>(i >= starts[b + 1]) |
             static_cast<uint64_t>(keys.keys[i] == 0) |
             static_cast<uint64_t>(group_of_table_[keys.tables[i]] ^ static_cast<int>(group));
  }
  if (wrong) refuse("keys must be sorted by bucket, not 0, and of tables of group " + std::to_string(group));
}

uint32_t Store::create_row(Group& group, uint32_t bucket, uint64_t key, uint8_t table) {
  const uint32_t slot = group.insert(group.bin(bucket), bucket, key, table);
  group.layout.create(group.row(slot), key, table, spec_.seed);
  rows_[table].fetch_add(1, std::memory_order_relaxed);
  return slot;
}

namespace {

// Adds up for a counter that others share, which it is added to when it goes.
struct Tally {
  explicit Tally(std::atomic<int64_t>& counter) : to(counter) {}
  ~Tally() {
    if (n) to.fetch_add(n, std::memory_order_relaxed);
  }
  Tally(const Tally&) = delete;
  Tally& operator=(const Tally&) = delete;

  std::atomic<int64_t>& to;
  int64_t n = 0;
};

}  // namespace

std::optional<Missing> Store::lookup(uint32_t index, const Keys& keys, float* out, bool create, uint8_t* found,
                                     uint32_t* touched, float* states, int64_t* known_pushes) {
  check_keys(index, keys);
  if (create && spec_.serving) refuse("a serving store makes no rows on lookup; look up with create=False");
  const bool reads = cold_ && !spec_.serving;
  if (cold_ && !reads && !found) refuse("rows may be on disk: a lookup must be able to say so in `found`");
  // Before anything is counted or made: a caller that must read rows first retries.
  if (const auto bucket = unread_bucket(index, keys)) return Missing{*bucket, true};
  Group& group = *groups_[index];
  const uint32_t width = group.layout.width(), state_floats = group.layout.state_floats();
  Fetched fetched{index, keys, reads ? fetch_batch(index, keys) : std::vector<uint32_t>()};
  Ahead ahead(group, keys.keys, keys.n);
  Tally created(created_);  // rows that were made count, whatever this returns
  for (size_t i = 0; i < keys.n;) {
    const uint32_t bucket = bucket_of(keys.keys[i]);
    const size_t end = keys.bucket_starts[bucket + 1];
    BucketState& state = states_[bucket];
    Bin& bin = group.bin(bucket);
    const std::unique_lock lock = lock_fetched(bucket, &fetched, 1);
    if (!state.held) return Missing{bucket, false};
    if (known_pushes)
      for (uint32_t p = 0; p < spec_.partitions; p++)
        known_pushes[static_cast<size_t>(bucket) * spec_.partitions + p] = offset_at(p, bucket);
    const uint32_t now = seconds(std::max(state.clock_ms, clock_ms_.load(std::memory_order_relaxed)));
    for (; i < end; i++) {
      ahead.at(i);
      if (i + kLocksAhead < keys.n) prefetch_write(&states_[bucket_of(keys.keys[i + kLocksAhead])]);
      const uint64_t key = keys.keys[i];
      const uint8_t table = keys.tables[i];
      float* row = out + i * width;
      uint32_t slot = group.find(bin, key, table);
      if (slot == Group::kNone && !known(state, group, bucket, key, table)) return Missing{bucket, true};
      if (found) {
        const bool perhaps =
            slot == Group::kNone && cold_ && !reads && group.cold->may_hold(group.cold->bin(bucket), {key, table});
        found[i] = slot != Group::kNone ? kHere : perhaps ? kPerhapsOnDisk : kAbsent;
      }
      if (touched) touched[i] = slot != Group::kNone ? group.header(slot).touched : 0;
      if (slot == Group::kNone && create) {
        Admission* gate = admission_[table].get();
        if (!gate || gate->see(bucket, key)) {
          slot = create_row(group, bucket, key, table);
          created.n++;
        } else {
          group.layout.initial(row, key, table, spec_.seed);
          if (states) group.layout.initial_state(row, states + i * state_floats);
          continue;
        }
      }
      if (slot == Group::kNone) {
        std::fill_n(row, width, 0.0f);
        if (states) std::fill_n(states + i * state_floats, state_floats, 0.0f);
        continue;
      }
      if (cold_) use(group.header(slot));
      if (create || spec_.serving) touch(group.header(slot), now);
      group.layout.load(group.row(slot), row);
      if (states) std::copy_n(group.layout.state(group.row(slot)), state_floats, states + i * state_floats);
    }
  }
  return std::nullopt;
}

// Put a row on a consumer's list, if it is not; returns how many rows that adds.
int64_t Store::mark(Bin& bin, Header& row, uint32_t slot, uint32_t consumer) {
  if (!spec_.consumed[consumer] || (row.meta & dirty_flag(consumer))) return 0;
  row.meta |= dirty_flag(consumer);
  bin.dirty[consumer].push_back(slot);
  return 1;
}

// The slot of a row that is to be stepped; none if its table does not admit the key.
uint32_t Store::slot_for_step(Group& group, uint32_t bucket, uint64_t key, uint8_t table, Counts& count) {
  const uint32_t slot = group.find(group.bin(bucket), key, table);
  if (slot != Group::kNone) return slot;
  const Admission* gate = admission_[table].get();
  if (gate && !gate->admitted(bucket, key)) {
    count.not_admitted++;
    return Group::kNone;
  }
  count.created++;
  return create_row(group, bucket, key, table);
}

void Store::apply_run(const PushGroup& push, Ahead& ahead, uint32_t bucket, uint32_t now_s, Stepped& sum) noexcept {
  Group& group = *groups_[push.group];
  Bin& bin = group.bin(bucket);
  const Keys& keys = push.keys;
  const uint32_t width = group.layout.width();
  uint32_t slots[kPiece];
  Place rows[kPiece];
  uint8_t stepped[kPiece];
  const size_t end = keys.bucket_starts[bucket + 1];
  for (size_t first = keys.bucket_starts[bucket]; first < end; first += kPiece) {
    const size_t n = std::min(kPiece, end - first);
    for (size_t i = 0; i < n; i++) {
      const size_t at = first + i;
      ahead.at(at);
      if (i && keys.keys[at] == keys.keys[at - 1] && keys.tables[at] == keys.tables[at - 1] &&
          slots[i - 1] != Group::kNone) {
        slots[i] = slots[i - 1], rows[i] = rows[i - 1];  // a further step of the row
        continue;
      }
      slots[i] = slot_for_step(group, bucket, keys.keys[at], keys.tables[at], sum.counts);
      rows[i] = slots[i] == Group::kNone ? Place{} : group.layout.place(group.row(slots[i]));
    }
    group.layout.step(rows, push.gradients + first * width, n, stepped);
    for (size_t i = 0; i < n; i++) {
      if (slots[i] == Group::kNone) continue;
      Header& row = *rows[i].header;
      touch(row, now_s);
      sum.counts.not_finite += !stepped[i];
      if (stepped[i]) row.meta &= ~meta::kOnDisk;
      if (stepped[i])
        for (uint32_t c = 0; c < kConsumers; c++) sum.listed[c] += mark(bin, row, slots[i], c);
    }
  }
}

void Store::count(const Stepped& sum) {
  for (uint32_t c = 0; c < kConsumers; c++)
    if (sum.listed[c]) pending_[c].fetch_add(sum.listed[c], std::memory_order_relaxed);
  if (sum.counts.created) created_.fetch_add(sum.counts.created, std::memory_order_relaxed);
  if (sum.counts.not_finite) not_finite_.fetch_add(sum.counts.not_finite, std::memory_order_relaxed);
  if (sum.counts.not_admitted) not_admitted_.fetch_add(sum.counts.not_admitted, std::memory_order_relaxed);
}

Pushed Store::push(const int64_t* ranges, size_t n, int64_t clock_ms, const std::vector<PushGroup>& groups,
                   const uint8_t* owned) {
  if (spec_.serving) refuse("a serving store takes no gradients");
  std::vector<uint32_t> partitions;
  for (size_t r = 0; r < n; r++) {
    const int64_t* range = ranges + 3 * r;
    if (range[0] < 0 || range[0] >= spec_.partitions)
      refuse("expected a partition below " + std::to_string(spec_.partitions) + ", found " + std::to_string(range[0]));
    if (range[1] < 0 || range[1] >= range[2])
      refuse("expected a range 0 <= start < stop, found [" + std::to_string(range[1]) + ", " +
             std::to_string(range[2]) + ")");
    partitions.push_back(static_cast<uint32_t>(range[0]));
  }
  if (n == 0) refuse("a push needs at least one range of offsets");
  std::sort(partitions.begin(), partitions.end());
  if (std::adjacent_find(partitions.begin(), partitions.end()) != partitions.end())
    refuse("a push holds at most one range a partition");
  for (const PushGroup& group : groups) check_keys(group.group, group.keys);

  std::vector<std::unique_lock<std::mutex>> partition_locks;
  for (const uint32_t p : partitions) partition_locks.emplace_back(partition_locks_[p]);

  // PROTOCOL 4: every bucket is judged before any is changed.
  enum : uint8_t { not_held, apply, skip };
  std::vector<uint8_t> decision(spec_.buckets, not_held);
  bool any = false;
  for (uint32_t b = 0; b < spec_.buckets; b++) {
    const bool meant = owned == nullptr || owned[b];
    if (owned && meant && !held_[b]) return Pushed::refused;
    if (!meant || !held_[b]) {
      for (const PushGroup& group : groups)
        if (group.keys.bucket_starts[b] != group.keys.bucket_starts[b + 1]) return Pushed::refused;
      continue;
    }
    size_t continues = 0, done = 0;
    for (size_t r = 0; r < n; r++) {
      const int64_t at = offset_at(ranges[3 * r], b);
      continues += at == ranges[3 * r + 1];
      done += at >= ranges[3 * r + 2];
    }
    if (continues != n && done != n) return Pushed::refused;
    decision[b] = continues == n ? apply : skip;
    any = any || continues == n;
  }
  if (!any) return Pushed::skipped;
  // No bucket is taken or dropped now, so the check stays valid.
  if (loading_.load(std::memory_order_relaxed))
    for (const PushGroup& group : groups)
      for (uint32_t b = 0; b < spec_.buckets; b++) {
        if (decision[b] != apply) continue;
        const std::lock_guard lock(states_[b].lock);
        for (uint32_t i = group.keys.bucket_starts[b]; i < group.keys.bucket_starts[b + 1]; i++)
          if (!known(states_[b], *groups_[group.group], b, group.keys.keys[i], group.keys.tables[i]))
            return Pushed::unread;
      }

  std::vector<Fetched> fetched;
  for (const PushGroup& group : groups)
    fetched.push_back({group.group, group.keys, fetch_batch(group.group, group.keys)});
  std::vector<Ahead> ahead;
  ahead.reserve(groups.size());
  for (const PushGroup& group : groups) ahead.emplace_back(*groups_[group.group], group.keys.keys, group.keys.n);
  const uint32_t now_s = seconds(clock_ms);
  Stepped sum;
  const auto has_keys = [&](uint32_t b) {
    for (const PushGroup& group : groups)
      if (group.keys.bucket_starts[b] != group.keys.bucket_starts[b + 1]) return true;
    return false;
  };
  for (uint32_t b = 0; b < spec_.buckets; b++) {
    const uint32_t next = b + static_cast<uint32_t>(kLocksAhead);
    if (next < spec_.buckets && has_keys(next)) {
      prefetch_write(&states_[next]);
      for (const PushGroup& group : groups) groups_[group.group]->prefetch_bin(next);
    }
    if (decision[b] != apply) continue;
    const auto advance = [&] {
      for (size_t r = 0; r < n; r++) {
        Applied& at = applied_at(ranges[3 * r], b);
        at.set(ranges[3 * r + 2], std::max(at.clock_ms.load(std::memory_order_relaxed), clock_ms));
      }
    };
    if (n == 1 && !has_keys(b)) {  // offsets of several partitions are flushed together or not at all
      advance();
      continue;
    }
    BucketState& state = states_[b];
    const std::unique_lock lock = lock_to_apply(b, fetched);
    for (size_t g = 0; g < groups.size(); g++)
      if (groups[g].keys.bucket_starts[b] != groups[g].keys.bucket_starts[b + 1])
        apply_run(groups[g], ahead[g], b, now_s, sum);
    advance();
    state.clock_ms = std::max(state.clock_ms, clock_ms);
  }
  count(sum);
  int64_t clock = clock_ms_.load(std::memory_order_relaxed);
  while (clock < clock_ms && !clock_ms_.compare_exchange_weak(clock, clock_ms, std::memory_order_relaxed)) {
  }
  return Pushed::applied;
}

// While the result lives no push is under way: each holds at least one partition.
std::vector<std::unique_lock<std::mutex>> Store::no_pushes() {
  std::vector<std::unique_lock<std::mutex>> all;
  for (uint32_t p = 0; p < spec_.partitions; p++) all.emplace_back(partition_locks_[p]);
  return all;
}

void Store::set_applied(uint32_t bucket, const int64_t* offsets, int64_t clock_ms) {
  check_bucket(bucket);
  const auto pushes = no_pushes();
  BucketState& state = states_[bucket];
  const std::lock_guard lock(state.lock);
  end_loading(state);
  hold(state, bucket, offsets, clock_ms);
}

// Under the bucket's lock, while no push is under way.
void Store::hold(BucketState& state, uint32_t bucket, const int64_t* offsets, int64_t clock_ms) {
  for (uint32_t p = 0; p < spec_.partitions; p++) applied_at(p, bucket).set(offsets[p], clock_ms);
  state.clock_ms = clock_ms;
  held_[bucket] = true;
  state.held = true;
}

void Store::applied_of(uint32_t bucket, int64_t* offsets) const {
  check_bucket(bucket);
  const std::lock_guard lock(states_[bucket].lock);
  for (uint32_t p = 0; p < spec_.partitions; p++) offsets[p] = offset_at(p, bucket);
}

// Under the bucket's lock.
int64_t Store::clock_at(uint32_t bucket) const {
  int64_t clock_ms = states_[bucket].clock_ms;
  for (uint32_t p = 0; p < spec_.partitions; p++)
    clock_ms = std::max(clock_ms, applied_at(p, bucket).clock_ms.load(std::memory_order_relaxed));
  return clock_ms;
}

int64_t Store::clock_of(uint32_t bucket) const {
  check_bucket(bucket);
  const std::lock_guard lock(states_[bucket].lock);
  return clock_at(bucket);
}

bool Store::held(uint32_t bucket) const {
  check_bucket(bucket);
  const std::lock_guard lock(states_[bucket].lock);
  return states_[bucket].held;
}

std::vector<uint32_t> Store::held() const {
  std::vector<uint32_t> buckets;
  for (uint32_t b = 0; b < spec_.buckets; b++)
    if (held(b)) buckets.push_back(b);
  return buckets;
}

std::vector<std::set<int64_t>> Store::applied() const {
  std::vector<std::set<int64_t>> distinct(spec_.partitions);
  for (uint32_t b = 0; b < spec_.buckets; b++) {
    const std::lock_guard lock(states_[b].lock);
    if (!states_[b].held) continue;
    for (uint32_t p = 0; p < spec_.partitions; p++) distinct[p].insert(offset_at(p, b));
  }
  return distinct;
}

void Store::drop_bucket(uint32_t bucket) {
  check_bucket(bucket);
  const auto pushes = no_pushes();
  BucketState& state = states_[bucket];
  const std::lock_guard lock(state.lock);
  for (const auto& group : groups_) {
    Bin& bin = group->bin(bucket);
    for (uint32_t row = 0; row < bin.rows; row++)
      rows_[group->header(group->slot_at(bin, row)).meta & meta::kTableMask].fetch_sub(1, std::memory_order_relaxed);
    for (uint32_t c = 0; c < kConsumers; c++)
      pending_[c].fetch_sub(static_cast<int64_t>(bin.dirty[c].size()), std::memory_order_relaxed);
    if (group->cold) {
      ColdBin& cold = group->cold->bin(bucket);
      for (size_t t = 0; t < group->tables.size(); t++)
        rows_[group->tables[t]].fetch_sub(cold.rows[t], std::memory_order_relaxed);
      pending_[flush].fetch_sub(cold.dirty, std::memory_order_relaxed);
      group->cold->clear(cold);
    }
    inexact_.fetch_sub(bin.inexact, std::memory_order_relaxed);
    group->clear(bin);
  }
  for (auto& list : state.removed) list = {};
  end_loading(state);
  state.clock_ms = 0;
  for (uint32_t p = 0; p < spec_.partitions; p++) applied_at(p, bucket).clock_ms = 0;
  held_[bucket] = false;
  state.held = false;
}

size_t Store::bytes() const {
  size_t sum = sizeof(BucketState) * states_.size() + sizeof(Applied) * spec_.partitions * spec_.buckets;
  sum += groups_.size() * sizeof(Bin) * spec_.buckets;
  for (const auto& gate : admission_)
    if (gate) sum += gate->bytes(spec_.buckets);
  return sum + hot_bytes();
}

Counts Store::counts() const { return {created_.load(), evicted_.load(), not_finite_.load(), not_admitted_.load()}; }

}  // namespace freshet
