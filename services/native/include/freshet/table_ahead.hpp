// Prefetches along the keys of a batch, so that the cache lines of a row are near when it is used.
#pragma once

#include <algorithm>

#include "freshet/table.hpp"

namespace freshet {

// Prefetches in bursts, each in a loop of its own, for keys of all buckets alike: the slots that the chunks of a span
// of keys seem to name, then a reach of rows at a time, while the rows of the burst before are used. A prefetch that
// finds the buffers of the core full stalls the instructions behind it: in a short loop the next prefetch, in one that
// also looks rows up the current row (20 M rows of 84 bytes, one thread of a Zen 4: 85 ns a lookup and 108 ns a step
// with a prefetch for each row, 58 and 86 in bursts).
class Ahead {
 public:
  Ahead(const Group& group, const uint64_t* keys, size_t n) : group_(group), keys_(keys), n_(n) {
    for (size_t i = 0; i < std::min(n, kReach); i++) ask_chunk(i);
    ask_rows();
  }
  // Key i is about to be taken; called for each, rising.
  void at(size_t i) {
    if (i + kReach >= asked_ && asked_ < n_) ask_rows();
  }

 private:
  static constexpr size_t kSpan = 512;  // keys whose chunks (32 KB) stay near until their rows have been taken
  static constexpr size_t kReach = 48;  // rows, and chunks, that are on their way at a time; 32 to 64 measure the same

  void ask_chunk(size_t i) {
    chunks_[i % kSpan] = group_.chunk_hint(keys_[i]);
    prefetch_far(chunks_[i % kSpan]);
  }
  void ask_rows() {
    if (asked_ == known_) find_out();
    const size_t end = std::min(asked_ + kReach, known_);
    for (; asked_ < end; asked_++) {
      const uint32_t slot = slots_[asked_ % kSpan];
      if (slot != Group::kNone) group_.prefetch_slot(slot);
    }
  }
  // Find the slots of the next span; the chunks of its first keys are prefetched already.
  void find_out() {
    const size_t end = std::min(n_, known_ + kSpan);
    for (size_t i = known_; i < end; i++) {
      slots_[i % kSpan] = Group::slot_hint(chunks_[i % kSpan], keys_[i]);
      if (i + kReach < n_) ask_chunk(i + kReach);
    }
    known_ = end;
  }

  const Group& group_;
  const uint64_t* keys_;
  size_t n_, known_ = 0, asked_ = 0;
  const Chunk* chunks_[kSpan];
  uint32_t slots_[kSpan];
};

}  // namespace freshet
