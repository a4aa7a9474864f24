// Joins impressions, shown events and actions of one partition into samples (PROTOCOL 18-20): state and decisions.
//
// The watermark W moves only in `advance`. Between two advances the outcome does not depend on the order in which the
// topics' batches come, only on the order within each. So (batches between advances, W of each advance) determines the
// state: a restart repeats exactly these and discards the samples.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "freshet/join_parts.hpp"
#include "freshet/join_samples.hpp"

namespace freshet::join {

inline constexpr size_t kMaxLabels = 32;
inline constexpr int64_t kNotBegun = std::numeric_limits<int64_t>::max();

enum class Aggregate : uint8_t { kSum, kCount, kMax, kMin, kLast };

struct LabelPlan {
  int64_t window_ms;
  int32_t given;  // label that must be true, or -1
  bool numeric;   // takes a number from its actions, known when its window closes; otherwise 1 or 0
};

// A number kept for each impression over the actions that match a label. Not-a-number stands for null: it is skipped;
// the sum and count of nothing are 0, the others null. `last` is the last by event time, then by arrival.
struct AggregatePlan {
  uint32_t label;
  Aggregate kind;
};

struct Plan {
  std::vector<LabelPlan> labels;
  std::vector<AggregatePlan> aggregates;  // A of them
  int64_t grace_ms;
  bool require_shown;
  bool early;                 // binary positives at once
  double negatives;           // share kept, in (0, 1]
  int64_t warm_up_waits = 0;  // 0, or at least 2: waits until early emission holds no positive (see `hold`)
};

// The outcome of an impression, an action or a shown event. Python reads the values.
enum class Outcome : uint8_t {
  kNew,             // taken
  kDuplicate,       // its id is known
  kLaterDuplicate,  // a duplicate dated later than the first: a replay that starts between the two must skip it
  kTooLate,         // older than the horizon, or (an action) all its labels were decided
  kWaiting,         // no impression yet
  kUnchanged,       // an action on labels that are true already
  kBeforeWindow,    // before its impression by more than the grace
  kAfterWindows,    // after its labels' windows: it waits for another impression, as a replay may not find this one
  kNoLabel,         // an action that matches no label
};

// Impressions, N of them in E served events whose bytes are spliced as prefix + element + suffix.
// Positions are absolute in `data`: begin <= prefix_end <= element_begin <= element_end <= suffix_begin <= end.
struct Impressions {
  std::span<const uint8_t> data;
  std::span<const int64_t> offsets, begins, prefix_ends, suffix_begins, ends;  // (E,)
  std::span<const uint64_t> requests;                                          // (E,)
  std::span<const uint32_t> schemas;                                           // (E,)
  std::span<const uint32_t> events;                                            // (N,) index of its event, rising
  std::span<const Key> keys;                                                   // (N,)
  std::span<const int64_t> times, element_begins, element_ends;                // (N,)
};

struct Actions {
  std::span<const int64_t> offsets, times;
  std::span<const Key> keys, ids;
  std::span<const uint32_t> masks;  // bit l: matches label l
  std::span<const double> values;   // (N, A) row-major: the value of each action for each aggregate
};

struct Shown {
  std::span<const int64_t> offsets, times;
  std::span<const Key> keys;
};

// Counters, exact: for each label, impressions + late_impressions = trained_* + not_shown + given_false +
// sampled_out + no_value + late + pending.
inline constexpr const char* kLabelCounters[] = {"trained_positive", "trained_negative", "not_shown", "given_false",
                                                 "sampled_out",      "no_value",         "late"};
inline constexpr const char* kEventCounters[] = {
    "impressions",   "impressions_repeated", "impressions_late", "actions_matched", "actions_again",
    "actions_late",  "actions_outside",      "actions_repeated", "actions_orphan",  "actions_no_label",
    "shown_matched", "shown_repeated",       "shown_late",       "shown_orphan",    "shown_outside"};
inline constexpr size_t kLabelCounterCount = std::size(kLabelCounters);
inline constexpr size_t kEventCounterCount = std::size(kEventCounters);

// 64-bit id of the sample (impression, label). Frozen: down-sampling and the ledger test depend on it.
int64_t sample_id(const Key& impression, uint32_t label);

// Whether a negative of this sample id is kept. Frozen with sample_id.
bool kept(int64_t sample, double share);

class Joiner {
 public:
  // Throws std::invalid_argument for a plan that makes no sense.
  explicit Joiner(Plan plan);
  Joiner(const Joiner&) = delete;  // the maps hold on to the pools
  Joiner& operator=(const Joiner&) = delete;

  // Each writes the outcome of every element. on_served throws std::invalid_argument, before it changes anything, if
  // spans point outside the data.
  void on_served(const Impressions& batch, std::span<Outcome> outcomes);
  void on_shown(const Shown& batch, std::span<Outcome> outcomes);
  void on_actions(const Actions& batch, std::span<Outcome> outcomes);

  void advance(int64_t watermark);    // decides what is due; W never goes back
  bool due(int64_t watermark) const;  // whether `advance` would decide anything
  int64_t watermark() const { return watermark_; }
  void restart_at(int64_t watermark);  // before any event: W at the start of a replay
  // Lowers W (PROTOCOL 19). Decisions stay. Until `end_recall`, batches repeat events that were read under the higher
  // W: impressions that were late or forgotten become known again, as decided; such actions and shown events wait for
  // impressions that are still to come, and are not counted again.
  void set_back(int64_t watermark);
  void end_recall();
  void begin_at(int64_t began) { began_ = began; }  // before any event: `began` of the joiner that is replayed
  int64_t began() const { return began_; }          // time of the first impression ever taken, or kNotBegun

  // Decided (or late) samples and the bytes of their payloads.
  Size ready(bool late) const { return (late ? late_ : decided_).ready(); }
  void take(bool late, const Samples& out) { (late ? late_ : decided_).take(out); }
  void discard() {  // in a replay: the samples were emitted before
    decided_.discard();
    late_.discard();
  }

  // The smallest offset of a topic (0 served, 1 shown, 2 action) that a restart must read, or `next`.
  int64_t low(size_t topic, int64_t next) { return retained_[topic].low(watermark_, next); }
  void counters(std::span<int64_t> out) const;  // (L * kLabelCounterCount + kEventCounterCount,)
  void set_counters(std::span<const int64_t> in);
  void pending(std::span<int64_t> out) const;  // (L,)
  void no_value(size_t label, bool matched);   // counts a taken sample without a value: it is not trained
  size_t waiting() const { return waiting_live_; }
  size_t ids() const { return entries_.size() + seen_.size(); }
  size_t payload_bytes() const { return events_.bytes(); }
  int64_t horizon_ms() const { return horizon_; }
  size_t labels() const { return labels_; }
  size_t aggregates() const { return plan_.aggregates.size(); }

 private:
  enum Topic : size_t { kServed, kShownTopic, kAction };
  enum LabelCounter : size_t { kPositive, kNegative, kNotShown, kGivenFalse, kSampledOut, kNoValue, kLateLabel };
  enum EventCounter : size_t {
    kImpressions,
    kImpressionsRepeated,
    kImpressionsLate,
    kMatched,
    kAgainCount,
    kLateCount,
    kOutsideCount,
    kRepeated,
    kOrphan,
    kNoLabelCount,
    kShownMatched,
    kShownRepeated,
    kShownLate,
    kShownOrphan,
    kShownOutside
  };

  struct Entry {  // an impression, or a placeholder for one that has not come
    Key key{};
    int64_t time = 0;
    uint32_t event = kNone;  // of `events_`
    uint32_t element = 0, element_begin = 0, element_end = 0;
    uint32_t first_waiting = kNone, last_waiting = kNone;
    uint32_t matched = 0, decided = 0;
    uint32_t prompt = 0;  // labels that became true after the end of their hold, by event time
    bool served = false, shown = false;
  };
  struct Waiting {  // an action or a shown event in no window of an impression so far
    int64_t time = 0;
    uint32_t entry = kNone, next = kNone, previous = kNone;
    uint32_t mask = 0;
    bool shown = false, orphan = false, done = false;
  };
  struct Seen {  // an action's id
    Key key{};
    int64_t time = 0;
  };
  static void check_time(int64_t time);
  void check(const Impressions& batch) const;
  uint32_t store(const Impressions& batch, size_t event);
  void serve(uint32_t entry, const Impressions& batch, size_t element, uint32_t ordinal, uint32_t stored);
  void serve_waiting(uint32_t entry);
  Outcome match(uint32_t entry, int64_t time, uint32_t mask, const double* values);
  Outcome act(const Actions& batch, size_t i);
  Outcome serve_one(const Impressions& batch, size_t element, uint32_t ordinal, uint32_t& stored);
  Outcome recall(const Impressions& batch, size_t element);
  bool recalls(int64_t time) const { return !recalling_ || set_back_from_ >= time + horizon_; }
  Outcome show_one(const Shown& batch, size_t i);
  void aggregate(uint32_t entry, size_t label, int64_t time, const double* values);
  Outcome show(uint32_t entry, int64_t time);
  void wait(const Key& key, uint32_t entry, int64_t time, uint32_t mask, const double* values, bool shown);
  void unlink(uint32_t waiting);
  void count_action(Outcome outcome);
  void count_shown(Outcome outcome);
  int64_t hold(int64_t time, size_t label) const;
  void note_prompt(Entry& entry, int64_t time, uint32_t labels);
  void emit_early(uint32_t entry);
  void emit_early(uint32_t entry, size_t label);
  void decide(uint32_t entry, size_t label);
  void emit(uint32_t entry, size_t label, float value, float weight);
  void emit_late(const Impressions& batch, size_t element, uint32_t ordinal, uint32_t stored);
  void mark_decided(uint32_t entry, size_t label, LabelCounter counter);
  void forget(uint32_t entry);
  double* aggregates_of(uint32_t entry);
  double* waiting_values(uint32_t waiting);
  int64_t& count(size_t label, LabelCounter counter) { return counters_[label * kLabelCounterCount + counter]; }
  int64_t& count(EventCounter counter) { return counters_[plan_.labels.size() * kLabelCounterCount + counter]; }
  bool late(int64_t time) const { return watermark_ >= time + horizon_; }

  Plan plan_;
  size_t labels_;
  int64_t horizon_ = 0, longest_window_ = 0;
  int64_t remembered_ = 0;     // how long an impression's id is known: longer than the id of any action in its windows
  std::vector<int64_t> wait_;  // per label: time from impression to decision
  std::vector<uint32_t> decide_order_;  // a label after the one it is given
  std::vector<uint32_t> gates_;         // per label: itself and the labels that are given it
  int64_t longest_wait_ = 0;
  int64_t watermark_;
  int64_t began_ = kNotBegun;
  bool recalling_ = false;
  int64_t set_back_from_ = 0;  // while recalling: the higher W before

  ServedEvents events_;
  Pool<Entry> entries_;
  Pool<Waiting> waiting_;
  Pool<Seen> seen_;
  KeyMap<Entry> entry_of_{entries_};
  KeyMap<Seen> seen_of_{seen_};
  std::vector<double> aggregates_;      // (entries, A)
  std::vector<int64_t> last_times_;     // (entries, A) if any is `last`
  std::vector<double> waiting_values_;  // (waiting, A)
  bool lasts_ = false;

  std::vector<TimeQueue> deadlines_;  // per label
  std::vector<TimeQueue> held_;       // per label: ends of the holds of positives
  TimeQueue entry_expiry_, seen_expiry_, orphan_at_, waiting_expiry_;
  Retained retained_[3];
  SampleBuffer decided_, late_;
  std::vector<int64_t> counters_, pending_;
  size_t waiting_live_ = 0;
};

}  // namespace freshet::join
