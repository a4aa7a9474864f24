#include "freshet/join.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <unordered_map>

namespace freshet::join {

namespace {

constexpr int64_t kBeginning = std::numeric_limits<int64_t>::min() / 4;
constexpr int64_t kLatestTime = int64_t{1} << 53;  // times beyond would overflow no sum here, and fit a JSON number

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64: a bijection
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBull;
  return x ^ (x >> 31);
}

void check_time(int64_t time) {
  if (time < 0 || time > kLatestTime) throw std::invalid_argument("an event's time must be in [0, 2^53] ms");
}

}  // namespace

int64_t sample_id(const Key& impression, uint32_t label) {
  return static_cast<int64_t>(mix(mix(impression.lo + 0x9E37'79B9'7F4A'7C15ull * (label + 1ull)) ^ impression.hi));
}

bool kept(int64_t sample, double share) {
  const uint64_t hash = mix(static_cast<uint64_t>(sample) ^ 0x6A09'E667'F3BC'C909ull);
  return static_cast<double>(hash >> 11) * 0x1p-53 < share;
}

Joiner::Joiner(Plan plan) : plan_(std::move(plan)), labels_(plan_.labels.size()), watermark_(kBeginning) {
  if (labels_ == 0 || labels_ > kMaxLabels) throw std::invalid_argument("a join takes 1 to 32 labels");
  if (plan_.grace_ms < 0) throw std::invalid_argument("the grace must not be negative");
  if (!(plan_.negatives > 0 && plan_.negatives <= 1)) throw std::invalid_argument("negatives must be in (0, 1]");
  if (plan_.ramp < 0 || plan_.ramp == 1) throw std::invalid_argument("the ramp must be 0 or at least 2");
  gates_.resize(labels_);
  for (size_t label = 0; label < labels_; ++label) {
    int64_t window = 0;
    size_t depth = 0;
    for (int64_t at = static_cast<int64_t>(label); at >= 0; at = plan_.labels[static_cast<size_t>(at)].given) {
      if (at >= static_cast<int64_t>(labels_) || ++depth > labels_)
        throw std::invalid_argument("`given` must name another label, without a circle");
      if (plan_.labels[static_cast<size_t>(at)].window_ms < 0)
        throw std::invalid_argument("a window must not be negative");
      window = std::max(window, plan_.labels[static_cast<size_t>(at)].window_ms);
    }
    wait_.push_back(window + plan_.grace_ms);
    longest_wait_ = std::max(longest_wait_, wait_.back());
    gates_[label] |= 1u << label;
    if (plan_.labels[label].given >= 0) gates_[static_cast<size_t>(plan_.labels[label].given)] |= 1u << label;
    longest_window_ = std::max(longest_window_, window);
    decide_order_.push_back(static_cast<uint32_t>(label));
  }
  for (const AggregatePlan& plan_of : plan_.aggregates) {
    if (plan_of.label >= labels_ || !plan_.labels[plan_of.label].numeric)
      throw std::invalid_argument("an aggregate belongs to a numeric label");
    lasts_ |= plan_of.kind == Aggregate::kLast;
  }
  // A chain's waits never fall along it, so by (wait, depth in the chain) a label comes after the one it is given.
  const auto depth_of = [this](uint32_t label) {
    size_t depth = 0;
    for (int32_t at = plan_.labels[label].given; at >= 0; at = plan_.labels[static_cast<size_t>(at)].given) ++depth;
    return depth;
  };
  std::stable_sort(decide_order_.begin(), decide_order_.end(),
                   [&](uint32_t a, uint32_t b) { return depth_of(a) < depth_of(b); });
  // Ids outlive every decision by a grace more, as an action may be dated a grace before its impression.
  horizon_ = longest_window_ + 2 * plan_.grace_ms;
  // An impression outlives every action in its windows: a replay that reads the action finds the impression too.
  remembered_ = horizon_ + longest_window_;
  deadlines_.resize(labels_);
  held_.resize(labels_);
  counters_.resize(labels_ * kLabelCounterCount + kEventCounterCount);
  pending_.resize(labels_);
}

// ---- served

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
  uint32_t blob = kNone, ordinal = 0;
  for (size_t i = 0; i < batch.keys.size(); ++i, ++ordinal) {
    if (i == 0 || batch.events[i] != batch.events[i - 1]) {
      blob = kNone;
      ordinal = 0;
    }
    outcomes[i] = serve_one(batch, i, ordinal, blob);
  }
}

// Takes one impression; its event's bytes are stored with the first element that needs them.
Outcome Joiner::serve_one(const Impressions& batch, size_t i, uint32_t ordinal, uint32_t& blob) {
  const size_t event = batch.events[i];
  const int64_t time = batch.times[i];
  if (recalling_) return recall(batch, i);
  if (late(time)) {
    if (blob == kNone) blob = store(batch, event);
    emit_late(batch, i, ordinal, blob);
    return Outcome::kLate;
  }
  uint32_t entry = entry_of_.find(batch.keys[i]);
  if (entry != kNone && entries_[entry].served) {
    ++count(kImpressionsRepeated);
    return time > entries_[entry].time ? Outcome::kGhost : Outcome::kRepeat;
  }
  if (entry == kNone) {
    entry = entries_.take();
    entries_[entry].key = batch.keys[i];
    entry_of_.insert(batch.keys[i], entry);
  }
  if (blob == kNone) blob = store(batch, event);
  if (time > blobs_[blob].retained) {  // elements of an event mostly share its time
    blobs_[blob].retained = time;
    retained_[kServed].push(batch.offsets[event], time + remembered_);
  }
  serve(entry, batch, i, ordinal, blob);
  return Outcome::kNew;
}

// Makes an impression known that is neither pending nor known: every label counts as decided, so that neither a repeat
// nor an action yields a sample of it.
Outcome Joiner::recall(const Impressions& batch, size_t i) {
  const int64_t time = batch.times[i];
  if (late(time) || !recalls(time)) return Outcome::kLate;
  uint32_t index = entry_of_.find(batch.keys[i]);
  if (index != kNone && entries_[index].served) return Outcome::kRepeat;
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
  return Outcome::kRepeat;
}

uint32_t Joiner::store(const Impressions& batch, size_t event) {
  const int64_t begin = batch.begins[event];
  const uint32_t index = blobs_.take();
  Blob& blob = blobs_[index];
  blob.size = static_cast<uint32_t>(batch.ends[event] - begin);
  blob.place = arena_.put(batch.data.data() + begin, blob.size);
  blob.prefix = static_cast<uint32_t>(batch.prefix_ends[event] - begin);
  blob.suffix = static_cast<uint32_t>(batch.suffix_begins[event] - begin);
  blob.schema = batch.schemas[event];
  blob.offset = batch.offsets[event];
  blob.request = batch.requests[event];
  return index;
}

void Joiner::release(uint32_t blob) {
  if (--blobs_[blob].refs != 0) return;
  arena_.free(blobs_[blob].place);
  blobs_.give_back(blob);
}

void Joiner::serve(uint32_t index, const Impressions& batch, size_t i, uint32_t ordinal, uint32_t blob) {
  const size_t event = batch.events[i];
  Entry& entry = entries_[index];
  entry.served = true;
  entry.time = batch.times[i];
  if (began_ == kNotBegun) began_ = entry.time;
  entry.blob = blob;
  entry.element = ordinal;
  entry.element_begin = static_cast<uint32_t>(batch.element_begins[i] - batch.begins[event]);
  entry.element_end = static_cast<uint32_t>(batch.element_ends[i] - batch.begins[event]);
  blobs_[blob].refs += static_cast<uint32_t>(labels_);
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

// Applies what came before the impression, in the order in which it came.
void Joiner::serve_waiting(uint32_t index) {
  for (uint32_t at = entries_[index].first_waiting; at != kNone;) {
    Waiting& waiting = waiting_[at];
    const uint32_t now = at;
    at = waiting.next;
    const Outcome outcome =
        waiting.shown ? show(index, waiting.time) : match(index, waiting.time, waiting.mask, waiting_values(now));
    if (outcome == Outcome::kBeyond) continue;
    unlink(now);
    if (waiting.orphan) continue;  // counted as such already
    if (waiting.shown)
      count_shown(outcome);
    else
      count_action(outcome);
  }
}

// ---- shown

void Joiner::on_shown(const Shown& batch, std::span<Outcome> outcomes) {
  for (const int64_t time : batch.times) check_time(time);
  for (size_t i = 0; i < batch.keys.size(); ++i) outcomes[i] = show_one(batch, i);
}

Outcome Joiner::show_one(const Shown& batch, size_t i) {
  const int64_t time = batch.times[i];
  if (!recalls(time)) return Outcome::kRepeat;
  if (late(time)) {
    ++count(kShownLate);
    return Outcome::kLate;
  }
  retained_[kShownTopic].push(batch.offsets[i], time + horizon_);
  const uint32_t entry = entry_of_.find(batch.keys[i]);
  if (entry == kNone || !entries_[entry].served) {
    wait(batch.keys[i], entry, time, 0, nullptr, true);
    return Outcome::kWaiting;
  }
  const Outcome outcome = show(entry, time);
  if (outcome == Outcome::kBeyond)
    wait(batch.keys[i], entry, time, 0, nullptr, true);
  else
    count_shown(outcome);
  emit_early(entry);
  return outcome;
}

Outcome Joiner::show(uint32_t index, int64_t time) {
  Entry& entry = entries_[index];
  if (time < entry.time - plan_.grace_ms) return Outcome::kOutside;
  if (time > entry.time + longest_window_) return Outcome::kBeyond;
  if (entry.shown) return Outcome::kAgain;
  // Of labels that were decided early, by an action that came before it, it is in time: whichever topic is read first.
  if (watermark_ >= entry.time + longest_window_ + plan_.grace_ms) return Outcome::kLate;
  entry.shown = true;
  if (plan_.require_shown) note_prompt(entry, time, ~0u);
  return Outcome::kNew;
}

void Joiner::count_shown(Outcome outcome) {
  switch (outcome) {
    case Outcome::kNew:
      ++count(kShownMatched);
      break;
    case Outcome::kAgain:
      ++count(kShownRepeated);
      break;
    case Outcome::kLate:
      ++count(kShownLate);
      break;
    default:
      ++count(kShownOutside);
      break;
  }
}

// ---- actions

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
  if (!recalls(time)) return Outcome::kRepeat;
  if (late(time)) {
    ++count(kLateCount);
    return Outcome::kLate;
  }
  if (const uint32_t known = seen_of_.find(batch.ids[i]); known != kNone) {
    ++count(kRepeated);
    return time > seen_[known].time ? Outcome::kGhost : Outcome::kRepeat;
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
  if (outcome == Outcome::kBeyond)
    wait(batch.keys[i], entry, time, mask, values, false);
  else
    count_action(outcome);
  emit_early(entry);
  return outcome;
}

// What an action does to its impression: the best that it does to any of its labels.
Outcome Joiner::match(uint32_t index, int64_t time, uint32_t mask, const double* values) {
  Entry& entry = entries_[index];
  if (time < entry.time - plan_.grace_ms) return Outcome::kOutside;
  bool in_window = false, again = false, applied = false;
  for (size_t label = 0; label < labels_; ++label) {
    const uint32_t bit = 1u << label;
    if ((mask & bit) == 0 || time > entry.time + plan_.labels[label].window_ms) continue;
    in_window = true;
    const bool numeric = plan_.labels[label].numeric;
    if (!numeric && (entry.matched & bit) != 0)
      again = true;
    else if ((entry.decided & bit) == 0) {
      applied = true;
      if (numeric) aggregate(index, label, time, values);
      if ((entry.matched & bit) == 0) note_prompt(entry, time, gates_[label]);
      entry.matched |= bit;
    }
  }
  if (applied) return Outcome::kNew;
  if (again) return Outcome::kAgain;
  return in_window ? Outcome::kLate : Outcome::kBeyond;
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
    case Outcome::kAgain:
      ++count(kAgainCount);
      break;
    case Outcome::kLate:
      ++count(kLateCount);
      break;
    default:
      ++count(kOutsideCount);
      break;
  }
}

// ---- waiting for an impression

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
  waiting.orphan = recalling_;  // counted when it was read first
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
  waiting.done = true;  // its place is given back when its expiry comes up
  --waiting_live_;
}

// ---- decisions

void Joiner::advance(int64_t watermark) {
  // Even if it stands still: what came since the last call may be due already.
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
    waiting_.give_back(at);
  });
  seen_expiry_.pop(watermark, [this](uint32_t at) {
    seen_of_.erase(seen_[at].key);
    seen_.give_back(at);
  });
  entry_expiry_.pop(watermark, [this](uint32_t entry) { forget(entry); });
}

bool Joiner::due(int64_t watermark) const {
  const auto is_due = [=](const TimeQueue& queue) { return queue.due(watermark); };
  return std::any_of(deadlines_.begin(), deadlines_.end(), is_due) || std::any_of(held_.begin(), held_.end(), is_due);
}

void Joiner::restart_at(int64_t watermark) { watermark_ = watermark; }

void Joiner::set_back(int64_t watermark) {
  if (watermark > watermark_) throw std::invalid_argument("the watermark can only be put back");
  set_back_from_ = watermark_;
  watermark_ = watermark;
  recalling_ = true;
}

void Joiner::end_recall() {
  recalling_ = false;
  for (Retained& retained : retained_) retained.sort();
}

// An id is forgotten, unless something waits for another impression of it.
void Joiner::forget(uint32_t entry) {
  const Entry old = entries_[entry];
  if (old.first_waiting != kNone) {
    Entry& left = entries_[entry] = Entry{};
    left.key = old.key;
    left.first_waiting = old.first_waiting;
    left.last_waiting = old.last_waiting;
    return;
  }
  entry_of_.erase(entries_[entry].key);
  entries_.give_back(entry);
}

// How long after its impression a positive is held. At once, the first wait of a model's life would bring positives
// only. So the first ones are held as long as a negative is, later ones less, after `ramp` waits none any more.
// A chain's waits never fall along it, so a label is never released before the one that it is given.
int64_t Joiner::hold(int64_t time, size_t label) const {
  const int64_t age = time > began_ ? time - began_ : 0;
  if (age >= plan_.ramp * wait_[label] || !plan_.early || plan_.labels[label].numeric) return 0;
  return wait_[label] - age / plan_.ramp;
}

// What makes these labels true came at `time`: if their holds were over by then, nothing holds them, however late
// it was read. Times of events decide this and not W, which depends on when commits happened to be made.
void Joiner::note_prompt(Entry& entry, int64_t time, uint32_t labels) {
  if (!plan_.early || entry.time >= began_ + plan_.ramp * longest_wait_) return;
  for (size_t label = 0; label < labels_; ++label)
    if ((labels >> label & 1) != 0 && time >= entry.time + hold(entry.time, label)) entry.prompt |= 1u << label;
}

void Joiner::emit_early(uint32_t index) {
  if (!plan_.early) return;
  const Entry& entry = entries_[index];
  for (uint32_t open = entry.matched & ~entry.decided; open != 0; open &= open - 1)
    emit_early(index, static_cast<size_t>(__builtin_ctz(open)));
}

// Emits a positive, or queues it while it is held. Held ones come in quicker succession than they happened, ramp waits
// of them in ramp - 1 waits: their weight makes up for it, so that positives and negatives always balance.
void Joiner::emit_early(uint32_t index, size_t label) {
  const Entry& entry = entries_[index];
  const LabelPlan& plan = plan_.labels[label];
  if (plan.numeric || (entry.decided >> label & 1) != 0 || (plan_.require_shown && !entry.shown)) return;
  if (plan.given >= 0 && (entry.matched >> plan.given & 1) == 0) return;
  float weight = 1.0f;
  const int64_t held = hold(entry.time, label);
  if (held > 0 && (entry.prompt >> label & 1) == 0) {
    // Another action may queue it again: what is decided by then is passed over.
    if (watermark_ < entry.time + held) return held_[label].push(entry.time + held, index);
    weight = static_cast<float>(1.0 - 1.0 / static_cast<double>(plan_.ramp));
  }
  emit(index, label, 1.0f, weight);
  settle(index, label, kPositive);
}

void Joiner::decide(uint32_t index, size_t label) {
  const Entry& entry = entries_[index];
  const LabelPlan& plan = plan_.labels[label];
  if (entry.decided >> label & 1) return;
  if (plan_.require_shown && !entry.shown) return settle(index, label, kNotShown);
  if (plan.given >= 0 && (entry.matched >> plan.given & 1) == 0) return settle(index, label, kGivenFalse);
  if (entry.matched >> label & 1) {
    emit(index, label, 1.0f, 1.0f);
    return settle(index, label, kPositive);
  }
  if (!kept(sample_id(entry.key, static_cast<uint32_t>(label)), plan_.negatives))
    return settle(index, label, kSampledOut);
  emit(index, label, 0.0f, static_cast<float>(1.0 / plan_.negatives));
  settle(index, label, kNegative);
}

void Joiner::emit(uint32_t index, size_t label, float value, float weight) {
  const Entry& entry = entries_[index];
  Blob& blob = blobs_[entry.blob];
  ++blob.refs;
  decided_bytes_ += blob.prefix + (entry.element_end - entry.element_begin) + (blob.size - blob.suffix);
  decided_.push_back({entry.blob, entry.element, entry.element_begin, entry.element_end,
                      sample_id(entry.key, static_cast<uint32_t>(label)), entry.time, value, weight,
                      static_cast<uint8_t>(label)});
  const double* numbers = aggregates_of(index);
  decided_aggregates_.insert(decided_aggregates_.end(), numbers, numbers + aggregates());
}

// A late impression teaches nothing, as nobody knows what was done with it: its value is not a number.
void Joiner::emit_late(const Impressions& batch, size_t i, uint32_t ordinal, uint32_t blob_index) {
  const size_t event = batch.events[i];
  Blob& blob = blobs_[blob_index];
  const auto begin = static_cast<uint32_t>(batch.element_begins[i] - batch.begins[event]);
  const auto end = static_cast<uint32_t>(batch.element_ends[i] - batch.begins[event]);
  ++count(kImpressionsLate);
  for (size_t label = 0; label < labels_; ++label) {
    ++count(label, kLateLabel);
    ++blob.refs;
    late_bytes_ += blob.prefix + (end - begin) + (blob.size - blob.suffix);
    late_.push_back({blob_index, ordinal, begin, end, sample_id(batch.keys[i], static_cast<uint32_t>(label)),
                     batch.times[i], std::numeric_limits<float>::quiet_NaN(), 1.0f, static_cast<uint8_t>(label)});
  }
}

void Joiner::settle(uint32_t index, size_t label, LabelCounter counter) {
  Entry& entry = entries_[index];
  entry.decided |= 1u << label;
  --pending_[label];
  ++count(label, counter);
  release(entry.blob);
}

// ---- what is ready

Size Joiner::ready(bool late) const {
  return late ? Size{late_.size(), late_bytes_} : Size{decided_.size(), decided_bytes_};
}

// By the time of the request's first impression here, so that a request's samples stand together; within a request
// by time and place. A total order, so that it does not depend on the order of decisions.
std::vector<uint32_t> Joiner::order(const std::vector<Emitted>& samples) const {
  std::unordered_map<uint64_t, int64_t> first;
  first.reserve(samples.size());
  for (const Emitted& sample : samples) {
    const Blob& blob = blobs_[sample.blob];
    const auto [at, added] = first.try_emplace(blob.request, sample.time);
    if (!added) at->second = std::min(at->second, sample.time);
  }
  struct Place {
    int64_t first;
    uint64_t request;
    int64_t time, offset;
    uint32_t element, label, index;
    auto operator<=>(const Place&) const = default;
  };
  std::vector<Place> places;
  places.reserve(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    const Blob& blob = blobs_[samples[i].blob];
    places.push_back({first[blob.request], blob.request, samples[i].time, blob.offset, samples[i].element,
                      samples[i].label, static_cast<uint32_t>(i)});
  }
  if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
  std::vector<uint32_t> order;
  order.reserve(places.size());
  for (const Place& place : places) order.push_back(place.index);
  return order;
}

void Joiner::take(bool late, const Samples& out) {
  std::vector<Emitted>& samples = late ? late_ : decided_;
  const size_t width = late ? 0 : aggregates();
  if (out.ids.size() != samples.size() || out.payload.size() != ready(late).bytes ||
      out.aggregates.size() != samples.size() * width)
    throw std::invalid_argument("take() needs arrays of the size that ready() told");
  uint8_t* to = out.payload.data();
  size_t n = 0;
  for (const uint32_t at : order(samples)) {
    const Emitted& sample = samples[at];
    const Blob& blob = blobs_[sample.blob];
    const uint8_t* from = arena_.at(blob.place);
    to = std::copy(from, from + blob.prefix, to);
    to = std::copy(from + sample.element_begin, from + sample.element_end, to);
    to = std::copy(from + blob.suffix, from + blob.size, to);
    out.ids[n] = sample.id;
    out.times[n] = sample.time;
    out.requests[n] = blob.request;
    out.values[n] = sample.value;
    out.weights[n] = sample.weight;
    out.labels[n] = sample.label;
    out.schemas[n] = blob.schema;
    out.ends[n] = to - out.payload.data();
    std::copy_n(decided_aggregates_.begin() + static_cast<ptrdiff_t>(at * width), width,
                out.aggregates.begin() + static_cast<ptrdiff_t>(n * width));
    ++n;
  }
  for (const Emitted& sample : samples) release(sample.blob);
  samples.clear();
  if (!late) decided_aggregates_.clear();
  (late ? late_bytes_ : decided_bytes_) = 0;
}

void Joiner::discard() {
  for (const Emitted& sample : decided_) release(sample.blob);
  for (const Emitted& sample : late_) release(sample.blob);
  decided_.clear();
  late_.clear();
  decided_aggregates_.clear();
  decided_bytes_ = late_bytes_ = 0;
}

void Joiner::counters(std::span<int64_t> out) const {
  if (out.size() != counters_.size()) throw std::invalid_argument("counters() needs an array of their number");
  std::copy(counters_.begin(), counters_.end(), out.begin());
}

void Joiner::set_counters(std::span<const int64_t> in) {
  if (in.size() != counters_.size()) throw std::invalid_argument("set_counters() needs an array of their number");
  std::copy(in.begin(), in.end(), counters_.begin());
}

void Joiner::pending(std::span<int64_t> out) const { std::copy(pending_.begin(), pending_.end(), out.begin()); }

void Joiner::no_value(size_t label, bool matched) {
  --count(label, matched ? kPositive : kNegative);
  ++count(label, kNoValue);
}

double* Joiner::aggregates_of(uint32_t entry) {
  const size_t need = (static_cast<size_t>(entry) + 1) * aggregates();
  if (aggregates_.size() < need) aggregates_.resize(std::max(need, aggregates_.size() * 2));
  if (lasts_ && last_times_.size() < need) last_times_.resize(std::max(need, last_times_.size() * 2));
  return aggregates_.data() + static_cast<size_t>(entry) * aggregates();
}

double* Joiner::waiting_values(uint32_t waiting) {
  const size_t need = (static_cast<size_t>(waiting) + 1) * aggregates();
  if (waiting_values_.size() < need) waiting_values_.resize(std::max(need, waiting_values_.size() * 2));
  return waiting_values_.data() + static_cast<size_t>(waiting) * aggregates();
}

}  // namespace freshet::join
