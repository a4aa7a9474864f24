// The joiner driven by bytes: any sequence of batches, with spans that may lie, keeps its ledger exact and yields only
// bytes of events. A restart from the log gives the state of the joiner that ran on. W may be set back; no sample is
// emitted twice.
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

#include "freshet/join.hpp"

namespace {

using namespace freshet::join;

constexpr size_t kTopics = 3;  // served, shown, actions

struct Bytes {
  const uint8_t* at;
  const uint8_t* end;
  uint8_t next() { return at == end ? 0 : *at++; }
  int64_t small(int range) { return next() % range; }
};

// One event on the log of its topic.
struct Event {
  int64_t offset = 0, time = 0;
  Key key{}, id{};
  uint32_t mask = 0;
  std::vector<double> values;              // of an action, one for each aggregate
  int64_t size = 0, lie = 0;               // of an impression: bytes of its element; how wrong its span is
  bool refused = false, left_out = false;  // by the joiner; by a replay
};

struct Commit {
  int64_t watermark = 0;
  int64_t next = 0;  // of each topic
  bool set_back = false;
  int64_t recall[kTopics] = {};
};

class Log {
 public:
  std::vector<Event> events[kTopics];
  std::vector<Commit> commits;
  int64_t end = 0;

  int64_t low[kTopics] = {};
  ptrdiff_t base = -1;  // the commit from which a replay begins; -1: the beginning

  // Takes events of one topic, in one batch.
  static void take(Joiner& joiner, size_t topic, std::span<Event*> events) {
    const size_t n = events.size();
    std::vector<Outcome> outcomes(n, Outcome::kNew);
    std::vector<int64_t> offsets, times;
    std::vector<Key> keys, ids;
    for (const Event* event : events) {
      offsets.push_back(event->offset);
      times.push_back(event->time);
      keys.push_back(event->key);
      ids.push_back(event->id);
    }
    if (topic == 0) {
      std::vector<uint8_t> bytes;
      std::vector<int64_t> begins, ends, element_begins;
      std::vector<uint64_t> requests;
      std::vector<uint32_t> schemas(n, 1), numbers;
      for (size_t i = 0; i < n; i++) {
        bytes.insert(bytes.end(), 3, 'x');
        begins.push_back(static_cast<int64_t>(bytes.size()));
        bytes.insert(bytes.end(), static_cast<size_t>(events[i]->size), 'e');
        ends.push_back(static_cast<int64_t>(bytes.size()));
        element_begins.push_back(begins.back() + events[i]->lie);
        requests.push_back(keys[i].hi / 2);
        numbers.push_back(static_cast<uint32_t>(i));
      }
      joiner.on_served(
          {bytes, offsets, begins, begins, ends, ends, requests, schemas, numbers, keys, times, element_begins, ends},
          outcomes);
    } else if (topic == 1) {
      joiner.on_shown({offsets, times, keys}, outcomes);
    } else {
      std::vector<uint32_t> masks;
      std::vector<double> values;
      for (const Event* event : events) {
        masks.push_back(event->mask);
        values.insert(values.end(), event->values.begin(), event->values.end());
      }
      joiner.on_actions({offsets, times, keys, ids, masks, values}, outcomes);
    }
    for (size_t i = 0; i < n; i++) events[i]->left_out |= outcomes[i] == Outcome::kLaterDuplicate;
  }

  // Reads [start, stop) of every topic.
  void read(Joiner& joiner, const int64_t (&start)[kTopics], int64_t stop, bool leave_out) {
    for (size_t topic = 0; topic < kTopics; topic++) {
      std::vector<Event> copies;  // a replay judges nothing anew
      for (const Event& event : events[topic])
        if (event.offset >= start[topic] && event.offset < stop && !event.refused && !(leave_out && event.left_out))
          copies.push_back(event);
      std::vector<Event*> batch;
      for (Event& event : copies) batch.push_back(&event);
      take(joiner, topic, batch);
    }
  }

  void commit(Joiner& joiner, Commit commit) {
    commit.next = end;
    commits.push_back(commit);
    for (size_t topic = 0; topic < kTopics; topic++)
      low[topic] = commit.set_back ? std::min(low[topic], commit.recall[topic]) : joiner.low(topic, end);
    const auto covers = [this](const Commit& one) {
      return one.next <= low[0] && one.next <= low[1] && one.next <= low[2];
    };
    while (base + 1 < std::ssize(commits) && covers(commits[static_cast<size_t>(base + 1)])) base++;
  }

  // Offsets from which events later than the horizon before a watermark are read.
  Commit setting_back(int64_t watermark, int64_t horizon) const {
    Commit commit{watermark, end, true, {}};
    for (size_t topic = 0; topic < kTopics; topic++) {
      commit.recall[topic] = end;
      for (const Event& event : events[topic])
        if (event.time > watermark - horizon) commit.recall[topic] = std::min(commit.recall[topic], event.offset);
    }
    return commit;
  }

  void set_back(Joiner& joiner, const Commit& commit, bool twice) {
    const int64_t* of = commit.recall;
    const int64_t start[kTopics] = {std::max(of[0], low[0]), std::max(of[1], low[1]), std::max(of[2], low[2])};
    joiner.set_back(commit.watermark);
    read(joiner, start, commit.next, false);
    if (twice) {  // served events and actions have ids: to read them again changes nothing
      const size_t ids = joiner.ids();
      const int64_t again[kTopics] = {start[0], commit.next, start[2]};
      read(joiner, again, commit.next, false);
      if (joiner.ids() != ids) std::abort();
    }
    joiner.end_recall();
  }

  // The state of the last commit, as a restart makes it: from the commit `base` on, without events below `low`.
  void replay(Joiner& joiner) {
    if (base >= 0) joiner.restart_at(commits[static_cast<size_t>(base)].watermark);
    int64_t from = base >= 0 ? commits[static_cast<size_t>(base)].next : 0;
    for (size_t at = static_cast<size_t>(base + 1); at < commits.size(); at++) {
      const Commit& commit = commits[at];
      if (commit.set_back) {
        set_back(joiner, commit, false);
        continue;
      }
      const int64_t start[kTopics] = {std::max(from, low[0]), std::max(from, low[1]), std::max(from, low[2])};
      read(joiner, start, commit.next, true);
      joiner.advance(commit.watermark);
      joiner.discard();
      from = std::max(from, commit.next);
    }
  }
};

std::vector<int64_t> pending(const Joiner& joiner) {
  std::vector<int64_t> found(joiner.labels());
  joiner.pending(found);
  return found;
}

void check_ledger(const Joiner& joiner) {
  std::vector<int64_t> counts(joiner.labels() * kLabelCounterCount + kEventCounterCount);
  const std::vector<int64_t> open = pending(joiner);
  joiner.counters(counts);
  const int64_t* events = counts.data() + joiner.labels() * kLabelCounterCount;
  for (size_t label = 0; label < joiner.labels(); label++) {
    int64_t sum = open[label];
    for (size_t i = 0; i < kLabelCounterCount; i++) sum += counts[label * kLabelCounterCount + i];
    if (sum != events[0] + events[2] || open[label] < 0) std::abort();
  }
}

// Returns the ids of the samples.
std::vector<int64_t> drain(Joiner& joiner, bool late) {
  const Size size = joiner.ready(late);
  std::vector<int64_t> ids(size.samples), times(size.samples), ends(size.samples);
  std::vector<uint64_t> requests(size.samples);
  std::vector<float> values(size.samples), weights(size.samples);
  std::vector<uint8_t> labels(size.samples), payload(size.bytes);
  std::vector<uint32_t> schemas(size.samples);
  std::vector<double> aggregates(late ? 0 : size.samples * joiner.aggregates());
  joiner.take(late, {ids, times, requests, values, weights, labels, schemas, ends, payload, aggregates});
  if (size.samples != 0 && ends.back() != static_cast<int64_t>(size.bytes)) std::abort();
  for (const uint8_t byte : payload)
    if (byte != 'e') std::abort();  // framing and gaps are 'x'
  return ids;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in{data, data + size};
  const uint8_t shape = in.next();
  // Only if repeats are dated as the first was, none is taken for new after its id was forgotten (PROTOCOL 20).
  const bool dated_alike = (in.next() & 1) != 0;
  const Plan plan{{{in.small(50), -1, false}, {in.small(99), 0, true}},
                  {{1, Aggregate::kSum}, {1, Aggregate::kLast}},
                  in.small(20),
                  (shape & 1) != 0,
                  (shape & 2) != 0,
                  (shape & 4) != 0 ? 0.5 : 1.0,
                  (shape & 8) != 0 ? 2 + (shape >> 4) : 0};
  auto joiner = std::make_unique<Joiner>(plan);
  Log log;
  std::set<int64_t> emitted;
  int64_t watermark = 0;
  for (int restarts = 0; in.at != in.end;) {
    const uint8_t what = in.next();
    const int kind = what & 7;
    const auto n = static_cast<size_t>(what >> 3);
    if (kind < 6) {
      const size_t topic = kind < 3 ? 0 : kind == 3 ? 1 : 2;
      std::vector<Event> batch(n);
      for (Event& event : batch) {
        event.offset = log.end++;
        event.time = in.small(250);
        event.key = {static_cast<uint64_t>(dated_alike ? event.time / 4 : in.small(8)), 1};
        event.id = {static_cast<uint64_t>(dated_alike ? event.time : in.small(32)), 2};
        if (dated_alike && topic == 0) event.time = event.time / 4 * 4;
        if (dated_alike && topic != 0) event.key.hi -= std::min<uint64_t>(event.key.hi, in.next() % 16);
        if (topic == 0) {
          event.size = 1 + in.small(9);
          event.lie = in.next() == 255 ? in.next() - 128 : 0;
        } else if (topic == 2) {
          event.mask = static_cast<uint32_t>(in.small(5));
          event.values = {static_cast<double>(in.small(7)), static_cast<double>(in.small(7))};
        }
      }
      std::vector<Event*> taken;
      for (Event& event : batch) taken.push_back(&event);
      try {
        Log::take(*joiner, topic, taken);
      } catch (const std::invalid_argument&) {
        for (Event& event : batch) event.refused = true;
      }
      log.events[topic].insert(log.events[topic].end(), batch.begin(), batch.end());
      continue;
    }
    watermark += in.small(60);
    joiner->advance(watermark);
    if (joiner->due(watermark)) std::abort();
    check_ledger(*joiner);
    for (const int64_t id : drain(*joiner, false))
      if (!emitted.insert(id).second && dated_alike) std::abort();
    drain(*joiner, true);
    if (joiner->low(0, log.end) > log.end) std::abort();
    log.commit(*joiner, {watermark, 0, false, {}});
    if (kind == 6 || ++restarts > 3) continue;  // each reads the log again
    if ((n & 1) != 0) {
      try {
        joiner->set_back(watermark + 1);
        std::abort();
      } catch (const std::invalid_argument&) {
      }
      watermark -= in.next();
      const Commit commit = log.setting_back(watermark, joiner->horizon_ms());
      log.commit(*joiner, commit);
      log.set_back(*joiner, commit, (n & 2) != 0);
      if (joiner->ready(false).samples != 0 || joiner->ready(true).samples != 0) std::abort();
    }
    auto again = std::make_unique<Joiner>(plan);
    if (joiner->began() != kNotBegun) again->begin_at(joiner->began());
    log.replay(*again);
    if (again->watermark() != watermark || pending(*again) != pending(*joiner)) std::abort();
    if (dated_alike && (again->ids() != joiner->ids() || again->waiting() != joiner->waiting())) std::abort();
    std::vector<int64_t> counts(plan.labels.size() * kLabelCounterCount + kEventCounterCount);
    joiner->counters(counts);
    again->set_counters(counts);
    if ((n & 4) != 0) joiner = std::move(again);
    if ((n & 1) != 0) check_ledger(*joiner);
  }
  joiner->advance(100'000);
  check_ledger(*joiner);
  if (joiner->ids() != 0 || joiner->waiting() != 0) std::abort();
  for (const int64_t id : drain(*joiner, false))
    if (!emitted.insert(id).second && dated_alike) std::abort();
  drain(*joiner, true);
  return 0;
}
