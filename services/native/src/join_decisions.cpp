// Decisions: positives as they come or after their hold, everything else when its window and grace are over.
#include <limits>

#include "freshet/join.hpp"

namespace freshet::join {

void Joiner::advance(int64_t watermark) {
  // Even at the same watermark: events that came since the last call may be due already.
  watermark = watermark_ = std::max(watermark_, watermark);
  for (size_t label = 0; label < labels_; ++label)
    held_[label].pop(watermark, [this, label](uint32_t entry) { emit_early(entry, label); });
  for (const uint32_t label : decide_order_)
    deadlines_[label].pop(watermark, [this, label](uint32_t entry) { decide(entry, label); });
  orphan_at_.pop(watermark, [this](uint32_t at) {
    Waiting& waiting = waiting_[at];
    if (waiting.done || waiting.orphan) return;
    waiting.orphan = true;
    ++count(waiting.shown ? kShownOrphan : kOrphan);
  });
  waiting_expiry_.pop(watermark, [this](uint32_t at) {
    const uint32_t entry = waiting_[at].entry;
    if (!waiting_[at].done) {
      unlink(at);
      if (entries_[entry].first_waiting == kNone && !entries_[entry].served) forget(entry);
    }
    waiting_.release(at);
  });
  seen_expiry_.pop(watermark, [this](uint32_t at) {
    seen_of_.erase(seen_[at].key);
    seen_.release(at);
  });
  entry_expiry_.pop(watermark, [this](uint32_t entry) { forget(entry); });
}

bool Joiner::due(int64_t watermark) const {
  const auto is_due = [=](const TimeQueue& queue) { return queue.due(watermark); };
  return std::any_of(deadlines_.begin(), deadlines_.end(), is_due) || std::any_of(held_.begin(), held_.end(), is_due);
}

// Forgets an id, unless an action or a shown event waits for another impression of it.
void Joiner::forget(uint32_t entry) {
  const Entry old = entries_[entry];
  if (old.first_waiting != kNone) {
    Entry& placeholder = entries_[entry] = Entry{};
    placeholder.key = old.key;
    placeholder.first_waiting = old.first_waiting;
    placeholder.last_waiting = old.last_waiting;
    return;
  }
  entry_of_.erase(entries_[entry].key);
  entries_.release(entry);
}

// How long after its impression a positive is held (label-delay warm-up). Without holds, the first wait of a model's
// life would yield positives only. So the first positives are held as long as a negative is, later ones less, and after
// `warm_up_waits` waits none. Waits never fall along a chain, so a label is never released before the one that it is
// given.
int64_t Joiner::hold(int64_t time, size_t label) const {
  const int64_t age = time > began_ ? time - began_ : 0;
  if (age >= plan_.warm_up_waits * wait_[label] || !plan_.early || plan_.labels[label].numeric) return 0;
  return wait_[label] - age / plan_.warm_up_waits;
}

// Note that an event of `time` made these labels true: a label whose hold was over by then is not held, however late
// the event is read. Event times decide this and not W, which depends on the times of commits.
void Joiner::note_prompt(Entry& entry, int64_t time, uint32_t labels) {
  if (!plan_.early || entry.time >= began_ + plan_.warm_up_waits * longest_wait_) return;
  for (size_t label = 0; label < labels_; ++label)
    if ((labels >> label & 1) != 0 && time >= entry.time + hold(entry.time, label)) entry.prompt |= 1u << label;
}

void Joiner::emit_early(uint32_t index) {
  if (!plan_.early) return;
  const Entry& entry = entries_[index];
  for (uint32_t open = entry.matched & ~entry.decided; open != 0; open &= open - 1)
    emit_early(index, static_cast<size_t>(__builtin_ctz(open)));
}

// Emits a positive, or queues it while it is held. Held positives are emitted faster than they happened, those of
// `warm_up_waits` waits in one wait less. Their weight corrects for it, so that positives and negatives balance.
void Joiner::emit_early(uint32_t index, size_t label) {
  const Entry& entry = entries_[index];
  const LabelPlan& plan = plan_.labels[label];
  if (plan.numeric || (entry.decided >> label & 1) != 0 || (plan_.require_shown && !entry.shown)) return;
  if (plan.given >= 0 && (entry.matched >> plan.given & 1) == 0) return;
  float weight = 1.0f;
  const int64_t held = hold(entry.time, label);
  if (held > 0 && (entry.prompt >> label & 1) == 0) {
    // Another action may queue it again; a label that is decided by then is skipped.
    if (watermark_ < entry.time + held) return held_[label].push(entry.time + held, index);
    weight = static_cast<float>(1.0 - 1.0 / static_cast<double>(plan_.warm_up_waits));
  }
  emit(index, label, 1.0f, weight);
  mark_decided(index, label, kPositive);
}

void Joiner::decide(uint32_t index, size_t label) {
  const Entry& entry = entries_[index];
  const LabelPlan& plan = plan_.labels[label];
  if (entry.decided >> label & 1) return;
  if (plan_.require_shown && !entry.shown) return mark_decided(index, label, kNotShown);
  if (plan.given >= 0 && (entry.matched >> plan.given & 1) == 0) return mark_decided(index, label, kGivenFalse);
  if (entry.matched >> label & 1) {
    emit(index, label, 1.0f, 1.0f);
    return mark_decided(index, label, kPositive);
  }
  if (!kept(sample_id(entry.key, static_cast<uint32_t>(label)), plan_.negatives))
    return mark_decided(index, label, kSampledOut);
  emit(index, label, 0.0f, static_cast<float>(1.0 / plan_.negatives));
  mark_decided(index, label, kNegative);
}

void Joiner::emit(uint32_t index, size_t label, float value, float weight) {
  const Entry& entry = entries_[index];
  decided_.push(
      {entry.event, entry.element, entry.element_begin, entry.element_end,
       sample_id(entry.key, static_cast<uint32_t>(label)), entry.time, value, weight, static_cast<uint8_t>(label)},
      aggregates_of(index));
}

// The value of a sample of a late impression is not a number: its actions may be forgotten already.
void Joiner::emit_late(const Impressions& batch, size_t i, uint32_t ordinal, uint32_t stored) {
  const size_t event = batch.events[i];
  const auto begin = static_cast<uint32_t>(batch.element_begins[i] - batch.begins[event]);
  const auto end = static_cast<uint32_t>(batch.element_ends[i] - batch.begins[event]);
  ++count(kImpressionsLate);
  for (size_t label = 0; label < labels_; ++label) {
    ++count(label, kLateLabel);
    late_.push({stored, ordinal, begin, end, sample_id(batch.keys[i], static_cast<uint32_t>(label)), batch.times[i],
                std::numeric_limits<float>::quiet_NaN(), 1.0f, static_cast<uint8_t>(label)},
               nullptr);
  }
}

void Joiner::mark_decided(uint32_t index, size_t label, LabelCounter counter) {
  Entry& entry = entries_[index];
  entry.decided |= 1u << label;
  --pending_[label];
  ++count(label, counter);
  events_.release(entry.event);
}

}  // namespace freshet::join
