// Served events: their impressions become known, pending or late.
#include <limits>
#include <stdexcept>

#include "freshet/join.hpp"

namespace freshet::join {

void Joiner::check(const Impressions& batch) const {
  const auto size = static_cast<int64_t>(batch.data.size());
  const size_t events = batch.offsets.size();
  for (size_t e = 0; e < events; ++e) {
    if (batch.begins[e] < 0 || batch.prefix_ends[e] < batch.begins[e] ||
        batch.suffix_begins[e] < batch.prefix_ends[e] || batch.ends[e] < batch.suffix_begins[e] ||
        batch.ends[e] > size || batch.ends[e] - batch.begins[e] > 0x7FFF'FFFF)
      throw std::invalid_argument("an event's spans must rise within its data");
  }
  for (size_t i = 0; i < batch.keys.size(); ++i) {
    check_time(batch.times[i]);
    const size_t e = batch.events[i];
    if (e >= events || (i != 0 && e < batch.events[i - 1]))
      throw std::invalid_argument("elements must name their events in order");
    if (batch.element_begins[i] < batch.prefix_ends[e] || batch.element_ends[i] < batch.element_begins[i] ||
        batch.element_ends[i] > batch.suffix_begins[e])
      throw std::invalid_argument("an element must lie between its event's prefix and suffix");
  }
}

void Joiner::on_served(const Impressions& batch, std::span<Outcome> outcomes) {
  check(batch);
  uint32_t stored = kNone, ordinal = 0;
  for (size_t i = 0; i < batch.keys.size(); ++i, ++ordinal) {
    if (i == 0 || batch.events[i] != batch.events[i - 1]) {
      stored = kNone;
      ordinal = 0;
    }
    outcomes[i] = serve_one(batch, i, ordinal, stored);
  }
}

// Adds one impression. The bytes of its event are stored with the first element that needs them.
Outcome Joiner::serve_one(const Impressions& batch, size_t i, uint32_t ordinal, uint32_t& stored) {
  const size_t event = batch.events[i];
  const int64_t time = batch.times[i];
  if (recalling_) return recall(batch, i);
  if (late(time)) {
    if (stored == kNone) stored = store(batch, event);
    emit_late(batch, i, ordinal, stored);
    return Outcome::kTooLate;
  }
  uint32_t entry = entry_of_.find(batch.keys[i]);
  if (entry != kNone && entries_[entry].served) {
    ++count(kImpressionsRepeated);
    return time > entries_[entry].time ? Outcome::kLaterDuplicate : Outcome::kDuplicate;
  }
  if (entry == kNone) {
    entry = entries_.take();
    entries_[entry].key = batch.keys[i];
    entry_of_.insert(batch.keys[i], entry);
  }
  if (stored == kNone) stored = store(batch, event);
  if (time > events_[stored].retained) {  // elements of an event mostly share its time
    events_[stored].retained = time;
    retained_[kServed].push(batch.offsets[event], time + remembered_);
  }
  serve(entry, batch, i, ordinal, stored);
  return Outcome::kNew;
}

// Makes an impression known again, as it is neither pending nor known. Every label counts as decided, so that neither
// a duplicate nor an action yields a sample of it.
Outcome Joiner::recall(const Impressions& batch, size_t i) {
  const int64_t time = batch.times[i];
  if (late(time) || !recalls(time)) return Outcome::kTooLate;
  uint32_t index = entry_of_.find(batch.keys[i]);
  if (index != kNone && entries_[index].served) return Outcome::kDuplicate;
  if (index == kNone) {
    index = entries_.take();
    entries_[index].key = batch.keys[i];
    entry_of_.insert(batch.keys[i], index);
  }
  Entry& entry = entries_[index];
  entry.served = true;
  entry.time = time;
  entry.decided = static_cast<uint32_t>((uint64_t{1} << labels_) - 1);
  entry_expiry_.push(time + remembered_, index);
  retained_[kServed].push(batch.offsets[batch.events[i]], time + remembered_);
  serve_waiting(index);
  return Outcome::kDuplicate;
}

uint32_t Joiner::store(const Impressions& batch, size_t event) {
  const int64_t begin = batch.begins[event];
  ServedEvent stored;
  stored.size = static_cast<uint32_t>(batch.ends[event] - begin);
  stored.prefix = static_cast<uint32_t>(batch.prefix_ends[event] - begin);
  stored.suffix = static_cast<uint32_t>(batch.suffix_begins[event] - begin);
  stored.schema = batch.schemas[event];
  stored.offset = batch.offsets[event];
  stored.request = batch.requests[event];
  return events_.add(stored, batch.data.data() + begin);
}

void Joiner::serve(uint32_t index, const Impressions& batch, size_t i, uint32_t ordinal, uint32_t stored) {
  const size_t event = batch.events[i];
  Entry& entry = entries_[index];
  entry.served = true;
  entry.time = batch.times[i];
  if (began_ == kNotBegun) began_ = entry.time;
  entry.event = stored;
  entry.element = ordinal;
  entry.element_begin = static_cast<uint32_t>(batch.element_begins[i] - batch.begins[event]);
  entry.element_end = static_cast<uint32_t>(batch.element_ends[i] - batch.begins[event]);
  events_[stored].refs += static_cast<uint32_t>(labels_);
  ++count(kImpressions);
  for (size_t label = 0; label < labels_; ++label) {
    ++pending_[label];
    deadlines_[label].push(entry.time + wait_[label], index);
  }
  entry_expiry_.push(entry.time + remembered_, index);
  double* numbers = aggregates_of(index);
  for (size_t a = 0; a < aggregates(); ++a)
    numbers[a] = plan_.aggregates[a].kind <= Aggregate::kCount ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  serve_waiting(index);
  emit_early(index);
}

// Applies the events that came before the impression, in the order of their arrival.
void Joiner::serve_waiting(uint32_t index) {
  for (uint32_t at = entries_[index].first_waiting; at != kNone;) {
    Waiting& waiting = waiting_[at];
    const uint32_t now = at;
    at = waiting.next;
    const Outcome outcome =
        waiting.shown ? show(index, waiting.time) : match(index, waiting.time, waiting.mask, waiting_values(now));
    if (outcome == Outcome::kAfterWindows) continue;
    unlink(now);
    if (waiting.orphan) continue;  // counted as an orphan already
    if (waiting.shown)
      count_shown(outcome);
    else
      count_action(outcome);
  }
}

}  // namespace freshet::join
