// A serving store with less memory than rows: the row store has those that are not here. A row whose last delta the row
// store may lack stays: deltas are numbered by epochs, and the caller knows up to which epoch the row store has them.
#include "freshet/store.hpp"

namespace freshet {

namespace {

// Whether the row store may lack the row's last delta; clean 0: it may lack any. Epochs count up from 1 and wrap
// around; rows of old epochs become rows of epoch 0 as they are visited.
bool is_pinned(const Header& row, uint16_t clean) {
  const auto epoch = static_cast<uint16_t>(row.meta >> meta::kEpochShift);
  return epoch && (clean == 0 || static_cast<int16_t>(epoch - clean) > 0);
}

}  // namespace

void Store::absent(uint32_t index, const Keys& keys, uint8_t* absent) const {
  check_keys(index, keys);
  const Group& group = *groups_[index];
  for (size_t i = 0; i < keys.n;) {
    const uint32_t bucket = bucket_of(keys.keys[i]);
    const size_t end = keys.bucket_starts[bucket + 1];
    const std::lock_guard lock(states_[bucket].lock);
    for (; i < end; i++) absent[i] = group.find(group.bin(bucket), keys.keys[i], keys.tables[i]) == Group::kNone;
  }
}

// Under the bucket's lock: epochs that the row store has become 0, and of those rows some are removed.
int64_t Store::evict_unused_of(uint32_t bucket, uint16_t clean, bool removes) {
  int64_t gone = 0;
  for (const auto& group : groups_) {
    Bin& bin = group->bin(bucket);
    int64_t here = 0;
    // From the end: the row that takes a hole's place has been examined.
    for (uint32_t row = bin.rows; row-- > 0;) {
      const uint32_t slot = group->slot_at(bin, row);
      Header& header = group->header(slot);
      if (is_pinned(header, clean)) continue;
      header.meta &= (1u << meta::kEpochShift) - 1;
      if (!removes) continue;
      const uint32_t hot = header.meta >> meta::kHotShift & meta::kMostHot;
      if (hot) {
        // Rows that are used often stay for more rounds: each level is left four times as slowly as the one below.
        if ((clock_draws_++ & ((1u << (2 * (hot - 1))) - 1)) == 0) header.meta -= 1u << meta::kHotShift;
        continue;
      }
      rows_[header.meta & meta::kTableMask].fetch_sub(1, std::memory_order_relaxed);
      group->erase(bin, slot);
      here++;
    }
    if (here) group->shrink(bin, bucket);
    gone += here;
  }
  return gone;
}

int64_t Store::evict_unused(size_t most_bytes, int64_t budget, const uint16_t* clean) {
  int64_t gone = 0;
  for (int64_t examined = 0; examined < budget;) {
    const uint32_t bucket = clock_cursor_++ & (spec_.buckets - 1);
    const std::lock_guard lock(states_[bucket].lock);
    for (const auto& group : groups_) examined += group->bin(bucket).rows;
    examined++;
    gone += evict_unused_of(bucket, clean[bucket], bytes() > most_bytes);
  }
  return gone;
}

}  // namespace freshet
