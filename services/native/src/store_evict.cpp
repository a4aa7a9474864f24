// Eviction by age and down to a table's size, a bounded piece at a time.
#include <algorithm>
#include <limits>

#include "store_cold.hpp"

namespace freshet {

namespace {

// Ages in seconds, in bins: one a second up to 4096 s, then 256 an octave (0.4 %). The last row within a bin to go is
// any of them; otherwise the least recently used go first.
constexpr uint32_t kExact = 4096, kPerOctave = 256;
constexpr uint32_t kBins = kExact + (32 - 12) * kPerOctave;

uint32_t bin_of(uint32_t age) {
  if (age < kExact) return age;
  const uint32_t octave = 31u - static_cast<uint32_t>(std::countl_zero(age));  // >= 12
  return kExact + (octave - 12) * kPerOctave + ((age >> (octave - 8)) & (kPerOctave - 1));
}

constexpr uint32_t kNoAge = std::numeric_limits<uint32_t>::max();

}  // namespace

// One walk over all buckets; two if some table has too many rows: first their ages are counted, then the oldest go.
struct Store::Round {
  uint32_t now_s = 0;
  int64_t now_ms = 0;
  bool counting = false;
  uint32_t cursor = 0;
  struct PerTable {
    std::vector<int64_t> ages;     // rows by age bin, while counting
    uint32_t oldest_bin = kNoAge;  // rows in later bins go; in this one, `in_bin` of them
    int64_t in_bin = 0;
  };
  std::map<uint8_t, PerTable> over;
};

void Store::RoundDeleter::operator()(Round* round) const { delete round; }

// Under the bucket's lock: visits the rows that are on disk alone and that the row store has, or that never changed.
template <typename Visit>
void Store::each_cold(size_t g, uint32_t bucket, const ColdScan& scan, Visit visit) {
  Group& group = *groups_[g];
  const ColdBin& bin = group.cold->bin(bucket);
  const uint32_t bytes = group.cold->record_bytes();
  for (size_t at = 0; at < scan.records[g].size(); at += bytes) {
    const ColdRecord record(scan.records[g].data() + at);
    if (!record.dirty(bin.epoch) && !bin.erased.contains(record.id()) &&
        group.find(group.bin(bucket), record.key(), record.table()) == Group::kNone)
      visit(record);
  }
}

void Store::count_ages(uint32_t bucket, const ColdScan& scan) {
  for (size_t g = 0; g < scan.records.size(); g++)
    each_cold(g, bucket, scan, [&](const ColdRecord& row) {
      if (const auto part = round_->over.find(row.table()); part != round_->over.end())
        part->second.ages[bin_of(round_->now_s - std::min(row.touched(), round_->now_s))]++;
    });
  for (auto& [table, part] : round_->over) {
    const Group& group = *groups_[group_of(table)];
    const Bin& bin = group.bin(bucket);
    for (uint32_t row = 0; row < bin.rows; row++) {
      const Header& header = group.header(group.slot_at(bin, row));
      // Rows that cannot go now must not count as if they could.
      if ((header.meta & meta::kTableMask) != table || (header.meta & meta::kDirtyFlush)) continue;
      part.ages[bin_of(round_->now_s - std::min(header.touched, round_->now_s))]++;
    }
  }
}

void Store::choose_oldest() {
  for (auto& [table, part] : round_->over) {
    int64_t excess = rows(table) - table_spec_[table].max_rows;
    part.oldest_bin = kBins;
    part.in_bin = 0;
    for (uint32_t b = kBins; b-- > 0 && excess > 0;) {
      part.oldest_bin = b;
      part.in_bin = std::min(excess, part.ages[b]);
      excess -= part.ages[b];
    }
    part.ages = {};
  }
}

bool Store::is_old(uint8_t table, uint32_t touched) {
  const uint32_t age = round_->now_s - std::min(touched, round_->now_s);
  const int64_t ttl_ms = table_spec_[table].ttl_ms;
  bool old = ttl_ms > 0 && static_cast<int64_t>(age) * 1000 >= ttl_ms;
  const auto over = round_->over.find(table);
  if (over != round_->over.end()) {
    Round::PerTable& part = over->second;
    const uint32_t b = bin_of(age);
    const bool last_bin = b == part.oldest_bin && part.in_bin > 0;
    if (last_bin) part.in_bin--;
    old = old || last_bin || b > part.oldest_bin;
  }
  return old;
}

// A row that is on disk alone, as `forget`; the page keeps it until it is written anew.
void Store::forget_cold(Group& group, uint32_t bucket, const ColdRecord& record) {
  ColdBin& bin = group.cold->bin(bucket);
  const uint8_t table = record.table();
  const bool stored = record.stored(bin.epoch);
  group.cold->erase(bin, record.id());
  bin.rows[table_index(group, table)]--;
  if (stored || record.steps())
    for (uint32_t c = 0; c < kConsumers; c++)
      if (spec_.consumed[c]) states_[bucket].removed[c].push_back({record.key(), table});
  group.bin(bucket).stored -= stored;
  rows_[table].fetch_sub(1, std::memory_order_relaxed);
}

int64_t Store::evict_bucket(uint32_t bucket, const ColdScan& scan) {
  int64_t gone = 0;
  for (size_t g = 0; g < scan.records.size(); g++)
    each_cold(g, bucket, scan, [&](const ColdRecord& row) {
      if (!is_old(row.table(), row.touched())) return;
      evicted_of_[row.table()].fetch_add(1, std::memory_order_relaxed);
      forget_cold(*groups_[g], bucket, row);
      gone++;
    });
  for (const auto& group : groups_) {
    Bin& bin = group->bin(bucket);
    bool relist = false;
    int64_t here = 0;
    // From the end: the row that takes a hole's place has been examined.
    for (uint32_t row = bin.rows; row-- > 0;) {
      const uint32_t slot = group->slot_at(bin, row);
      const Header& header = group->header(slot);
      if (header.meta & meta::kDirtyFlush) continue;
      const uint8_t table = static_cast<uint8_t>(header.meta & meta::kTableMask);
      if (!is_old(table, header.touched)) continue;
      forget(*group, bucket, slot, relist);
      evicted_of_[table].fetch_add(1, std::memory_order_relaxed);
      here++;
    }
    if (relist) group->relist(bin);
    if (here) group->shrink(bin, bucket);
    gone += here;
  }
  return gone;
}

Evicted Store::evict(int64_t now_ms, int64_t budget) {
  check_cold();
  const std::lock_guard evicting(evict_lock_);
  Evicted out;
  if (!round_) {
    round_.reset(new Round);
    round_->now_ms = now_ms;
    round_->now_s = seconds(now_ms);
    bool any_ttl = false;
    for (const TableSpec& table : spec_.tables) {
      any_ttl = any_ttl || table.ttl_ms > 0;
      if (table.max_rows > 0 && rows(table.id) > table.max_rows) round_->over[table.id].ages.assign(kBins, 0);
    }
    round_->counting = !round_->over.empty();
    if (!any_ttl && round_->over.empty()) {
      round_.reset();
      out.finished = true;
      return out;
    }
  }
  while (out.examined < budget) {
    const uint32_t bucket = round_->cursor++;
    {
      const auto [scan, lock] = lock_scanned(bucket);
      for (const auto& group : groups_) out.examined += group->bin(bucket).rows;
      for (size_t g = 0; g < scan.records.size(); g++)
        out.examined += static_cast<int64_t>(scan.records[g].size() / groups_[g]->cold->record_bytes());
      if (!states_[bucket].held || states_[bucket].loading)
        ;  // being loaded: its rows are the row store's
      else if (round_->counting)
        count_ages(bucket, scan);
      else
        out.evicted += evict_bucket(bucket, scan);
    }
    if (round_->cursor < spec_.buckets) continue;
    if (!round_->counting) {
      round_.reset();
      out.finished = true;
      break;
    }
    choose_oldest();
    round_->counting = false;
    round_->cursor = 0;
  }
  evicted_.fetch_add(out.evicted, std::memory_order_relaxed);
  return out;
}

}  // namespace freshet
