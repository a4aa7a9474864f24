// Shown events and actions: each matches a known impression, or waits for one.
#include <cmath>

#include "freshet/join.hpp"

namespace freshet::join {

void Joiner::on_shown(const Shown& batch, std::span<Outcome> outcomes) {
  for (const int64_t time : batch.times) check_time(time);
  for (size_t i = 0; i < batch.keys.size(); ++i) outcomes[i] = show_one(batch, i);
}

Outcome Joiner::show_one(const Shown& batch, size_t i) {
  const int64_t time = batch.times[i];
  if (!recalls(time)) return Outcome::kDuplicate;
  if (late(time)) {
    ++count(kShownLate);
    return Outcome::kTooLate;
  }
  retained_[kShownTopic].push(batch.offsets[i], time + horizon_);
  const uint32_t entry = entry_of_.find(batch.keys[i]);
  if (entry == kNone || !entries_[entry].served) {
    wait(batch.keys[i], entry, time, 0, nullptr, true);
    return Outcome::kWaiting;
  }
  const Outcome outcome = show(entry, time);
  if (outcome == Outcome::kAfterWindows)
    wait(batch.keys[i], entry, time, 0, nullptr, true);
  else
    count_shown(outcome);
  emit_early(entry);
  return outcome;
}

Outcome Joiner::show(uint32_t index, int64_t time) {
  Entry& entry = entries_[index];
  if (time < entry.time - plan_.grace_ms) return Outcome::kBeforeWindow;
  if (time > entry.time + longest_window_) return Outcome::kAfterWindows;
  if (entry.shown) return Outcome::kUnchanged;
  // Not too late for labels that an earlier action decided early: the order of reading the topics must not matter.
  if (watermark_ >= entry.time + longest_window_ + plan_.grace_ms) return Outcome::kTooLate;
  entry.shown = true;
  if (plan_.require_shown) note_prompt(entry, time, ~0u);
  return Outcome::kNew;
}

void Joiner::count_shown(Outcome outcome) {
  switch (outcome) {
    case Outcome::kNew:
      ++count(kShownMatched);
      break;
    case Outcome::kUnchanged:
      ++count(kShownRepeated);
      break;
    case Outcome::kTooLate:
      ++count(kShownLate);
      break;
    default:
      ++count(kShownOutside);
      break;
  }
}

void Joiner::on_actions(const Actions& batch, std::span<Outcome> outcomes) {
  for (const int64_t time : batch.times) check_time(time);
  for (size_t i = 0; i < batch.keys.size(); ++i) outcomes[i] = act(batch, i);
}

Outcome Joiner::act(const Actions& batch, size_t i) {
  const int64_t time = batch.times[i];
  const uint32_t mask = batch.masks[i] & static_cast<uint32_t>((uint64_t{1} << labels_) - 1);
  if (mask == 0) {
    ++count(kNoLabelCount);
    return Outcome::kNoLabel;
  }
  if (!recalls(time)) return Outcome::kDuplicate;
  if (late(time)) {
    ++count(kLateCount);
    return Outcome::kTooLate;
  }
  if (const uint32_t known = seen_of_.find(batch.ids[i]); known != kNone) {
    ++count(kRepeated);
    return time > seen_[known].time ? Outcome::kLaterDuplicate : Outcome::kDuplicate;
  }
  const uint32_t seen = seen_.take();
  seen_[seen] = Seen{batch.ids[i], time};
  seen_of_.insert(batch.ids[i], seen);
  seen_expiry_.push(time + horizon_, seen);
  retained_[kAction].push(batch.offsets[i], time + horizon_);

  const double* values = batch.values.data() + i * aggregates();
  const uint32_t entry = entry_of_.find(batch.keys[i]);
  if (entry == kNone || !entries_[entry].served) {
    wait(batch.keys[i], entry, time, mask, values, false);
    return Outcome::kWaiting;
  }
  const Outcome outcome = match(entry, time, mask, values);
  if (outcome == Outcome::kAfterWindows)
    wait(batch.keys[i], entry, time, mask, values, false);
  else
    count_action(outcome);
  emit_early(entry);
  return outcome;
}

// Applies an action to its impression; returns the best outcome over its labels.
Outcome Joiner::match(uint32_t index, int64_t time, uint32_t mask, const double* values) {
  Entry& entry = entries_[index];
  if (time < entry.time - plan_.grace_ms) return Outcome::kBeforeWindow;
  bool in_window = false, already_true = false, applied = false;
  for (size_t label = 0; label < labels_; ++label) {
    const uint32_t bit = 1u << label;
    if ((mask & bit) == 0 || time > entry.time + plan_.labels[label].window_ms) continue;
    in_window = true;
    const bool numeric = plan_.labels[label].numeric;
    if (!numeric && (entry.matched & bit) != 0)
      already_true = true;
    else if ((entry.decided & bit) == 0) {
      applied = true;
      if (numeric) aggregate(index, label, time, values);
      if ((entry.matched & bit) == 0) note_prompt(entry, time, gates_[label]);
      entry.matched |= bit;
    }
  }
  if (applied) return Outcome::kNew;
  if (already_true) return Outcome::kUnchanged;
  return in_window ? Outcome::kTooLate : Outcome::kAfterWindows;
}

void Joiner::aggregate(uint32_t index, size_t label, int64_t time, const double* values) {
  double* totals = aggregates_of(index);
  for (size_t a = 0; a < aggregates(); ++a) {
    const double value = values[a];
    if (plan_.aggregates[a].label != label || std::isnan(value)) continue;
    double& total = totals[a];
    const bool first = std::isnan(total);
    switch (plan_.aggregates[a].kind) {
      case Aggregate::kSum:
        total += value;
        break;
      case Aggregate::kCount:
        total += 1;
        break;
      case Aggregate::kMax:
        total = first ? value : std::max(total, value);
        break;
      case Aggregate::kMin:
        total = first ? value : std::min(total, value);
        break;
      case Aggregate::kLast: {
        int64_t& last = last_times_[index * aggregates() + a];
        if (first || time >= last) {
          total = value;
          last = time;
        }
        break;
      }
    }
  }
}

void Joiner::count_action(Outcome outcome) {
  switch (outcome) {
    case Outcome::kNew:
      ++count(kMatched);
      break;
    case Outcome::kUnchanged:
      ++count(kAgainCount);
      break;
    case Outcome::kTooLate:
      ++count(kLateCount);
      break;
    default:
      ++count(kOutsideCount);
      break;
  }
}

void Joiner::wait(const Key& key, uint32_t entry, int64_t time, uint32_t mask, const double* values, bool shown) {
  if (entry == kNone) {
    entry = entries_.take();
    entries_[entry].key = key;
    entry_of_.insert(key, entry);
  }
  const uint32_t at = waiting_.take();
  Waiting& waiting = waiting_[at];
  waiting.time = time;
  waiting.entry = entry;
  waiting.mask = mask;
  waiting.shown = shown;
  waiting.orphan = recalling_;  // counted when it was first read
  waiting.previous = entries_[entry].last_waiting;
  if (waiting.previous == kNone)
    entries_[entry].first_waiting = at;
  else
    waiting_[waiting.previous].next = at;
  entries_[entry].last_waiting = at;
  if (!shown) std::copy_n(values, aggregates(), waiting_values(at));
  ++waiting_live_;
  orphan_at_.push(time + plan_.grace_ms, at);
  waiting_expiry_.push(time + horizon_, at);
}

void Joiner::unlink(uint32_t at) {
  Waiting& waiting = waiting_[at];
  Entry& entry = entries_[waiting.entry];
  if (waiting.previous == kNone)
    entry.first_waiting = waiting.next;
  else
    waiting_[waiting.previous].next = waiting.next;
  if (waiting.next == kNone)
    entry.last_waiting = waiting.previous;
  else
    waiting_[waiting.next].previous = waiting.previous;
  waiting.done = true;  // its index is released at its expiry
  --waiting_live_;
}

}  // namespace freshet::join
