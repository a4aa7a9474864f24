#include "freshet/hedge_loop.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace freshet {
namespace {

enum Stage : size_t { plan_stage, lookup_stage, model_stage, wait_stage, step_stage, push_stage };

void demand(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("loop: expected " + what);
}

// How long a lane has been in each stage.
class Watch {
 public:
  explicit Watch(std::array<double, 6>& seconds) : seconds_(seconds) {}
  void mark(Stage stage) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[stage] += std::chrono::duration<double>(now - at_).count();
    at_ = now;
  }

 private:
  std::array<double, 6>& seconds_;
  std::chrono::steady_clock::time_point at_ = std::chrono::steady_clock::now();
};

int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// What a batch needs of one group, reused from batch to batch.
struct Work {
  explicit Work(uint32_t buckets) : plan(buckets) {}
  Plan plan;
  std::vector<uint8_t> tables;
  Buffer<uint64_t> keys;
  Buffer<uint32_t> starts;
  std::vector<Buffer<uint32_t>> ends;
  Buffer<float> rows, states, gradients;
  Buffer<uint64_t> push_keys;
  Buffer<uint8_t> push_tables;
  Buffer<uint32_t> push_starts;
};

}  // namespace

struct HedgeLoop::Lane {
  Lane(Store& store, const HedgeModel& model, const std::vector<std::vector<uint8_t>>& tables, bool steps)
      : hedge(model, true), in_steps(steps) {
    for (const std::vector<uint8_t>& of : tables) {
      Work& made = work.emplace_back(store.buckets());
      made.ends.resize(of.size());
      made.tables = of;
    }
    view.groups.resize(work.size());
    push.resize(work.size());
  }

  // The keys of samples [first, last) of one group, in memory of their own: a plan takes them feature-major.
  void gather(const LoopGroup& from, size_t group, int64_t first, int64_t last) {
    Work& mine = work[group];
    const size_t features = mine.tables.size();
    uint32_t* starts = mine.starts.reserve(features + 1);
    const auto span = [&](size_t f) {
      const uint32_t* list = from.ends[f];
      if (!list) return std::pair<uint32_t, uint32_t>(static_cast<uint32_t>(first), static_cast<uint32_t>(last));
      return std::pair<uint32_t, uint32_t>(first ? list[first - 1] : 0, last ? list[last - 1] : 0);
    };
    starts[0] = 0;
    for (size_t f = 0; f < features; f++) starts[f + 1] = starts[f] + (span(f).second - span(f).first);
    uint64_t* keys = mine.keys.reserve(starts[features]);
    GroupView& to = view.groups[group];
    to.ends.resize(features);
    for (size_t f = 0; f < features; f++) {
      const auto [begin, end] = span(f);
      std::copy(from.keys + from.starts[f] + begin, from.keys + from.starts[f] + end, keys + starts[f]);
      to.ends[f] = nullptr;
      if (!from.ends[f]) continue;
      uint32_t* ends = mine.ends[f].reserve(static_cast<size_t>(last - first));
      for (int64_t i = first; i < last; i++) ends[i - first] = from.ends[f][i] - begin;
      to.ends[f] = ends;
    }
    mine.plan.run(keys, starts[features], starts, mine.tables.data(), features);
  }

  void plan(const LoopSamples& samples, int64_t first, int64_t last) {
    view.size = last - first;
    for (size_t g = 0; g < work.size(); g++) gather(samples.groups[g], g, first, last);
  }

  std::optional<Missing> look_up(Store& store, const InputPlan& input, const std::vector<RowLayout>& copies) {
    for (size_t g = 0; g < work.size(); g++) {
      Work& mine = work[g];
      GroupView& to = view.groups[g];
      const size_t unique = mine.plan.unique(), floats = unique * static_cast<size_t>(input.groups[g].slots);
      float* rows_of = mine.rows.reserve(floats);
      const RowLayout& layout = copies[g];
      float* states_of = in_steps ? mine.states.reserve(unique * layout.state_floats()) : nullptr;
      if (const auto missing =
              store.lookup(static_cast<uint32_t>(g), keys_of(g), rows_of, true, nullptr, nullptr, states_of))
        return missing;
      to.rows = to.copies = rows_of;
      to.states = states_of;
      if (!in_steps) to.gradients = mine.gradients.reserve(floats);
      to.layout = &layout;
      to.unique = static_cast<int64_t>(unique);
      to.positions = mine.plan.positions.data();
      to.occurrences = static_cast<int64_t>(mine.plan.occurrences());
      to.starts = mine.starts.data();
    }
    return std::nullopt;
  }

  Keys keys_of(size_t group) const {
    const Plan& of = work[group].plan;
    return {of.keys.data(), of.tables.data(), of.unique(), of.bucket_starts.data()};
  }

  void begin(const LoopSamples& samples, int64_t first, int64_t labels, bool learn_dense, float* predictions) {
    view.dense = samples.dense + first * dense;
    view.label = samples.label + first;
    view.value = samples.value + first;
    view.weight = samples.weight + first;
    learns_dense = learn_dense;
    hedge.begin(view, learn_dense, in_steps, predictions + first * labels);
  }

  // The rows of one dense step.
  void advance() {
    counted = learns_dense ? hedge.next_rows() : 0;
    hedge.advance();
  }

  // Push the batch. In this loop gradients meet their keys only here. A row that several steps within the batch have
  // changed stands in the push once for each, in their order.
  Pushed push_to(Store& store, const int64_t* ranges, size_t n, int64_t clock_ms) {
    for (size_t g = 0; g < work.size(); g++) {
      Work& mine = work[g];
      if (!in_steps) {
        push[g] = {static_cast<uint32_t>(g), keys_of(g), view.groups[g].gradients};
        continue;
      }
      const StepGradients& made = hedge.gradients(g);
      const size_t unique = mine.plan.unique(), all = made.starts[unique];
      uint64_t* keys = mine.push_keys.reserve(all);
      uint8_t* tables = mine.push_tables.reserve(all);
      uint32_t* starts = mine.push_starts.reserve(store.buckets() + 1);
      for (size_t r = 0; r < unique; r++) {
        std::fill(keys + made.starts[r], keys + made.starts[r + 1], mine.plan.keys.data()[r]);
        std::fill(tables + made.starts[r], tables + made.starts[r + 1], mine.plan.tables.data()[r]);
      }
      for (uint32_t b = 0; b <= store.buckets(); b++) starts[b] = made.starts[mine.plan.bucket_starts.data()[b]];
      push[g] = {static_cast<uint32_t>(g), {keys, tables, all, starts}, made.values.data()};
    }
    return store.push(ranges, n, clock_ms, push);
  }

  void keep(const InputPlan& input, size_t batch) {
    LoopKept& to = kept.emplace_back();
    to.batch = batch;
    for (size_t g = 0; g < work.size(); g++) {
      const GroupView& from = view.groups[g];
      LoopKept::Group& group = to.groups.emplace_back();
      group.rows.assign(from.rows, from.rows + from.unique * input.groups[g].slots);
      group.positions.assign(from.positions, from.positions + from.occurrences);
      group.starts.assign(from.starts, from.starts + from.ends.size() + 1);
      for (const uint32_t* ends : from.ends) {
        auto& list = group.ends.emplace_back();
        if (ends) list.assign(ends, ends + view.size);
      }
    }
  }

  HedgeLane hedge;
  const bool in_steps;
  int64_t dense = 0;
  std::vector<Work> work;
  BatchView view;
  std::vector<PushGroup> push;
  std::vector<LoopKept> kept;
  bool learns_dense = true;
  int64_t counted = 0;  // rows that it brings to the step
  bool busy = false;    // its batch goes on after the step
  bool more = false;    // it has something to do after the step
  Watch* watch = nullptr;
};

HedgeLoop::HedgeLoop(Store& store, HedgeModel& model, std::vector<std::vector<uint8_t>> tables, uint32_t lanes,
                     bool sync, bool in_steps)
    : store_(store),
      model_(model),
      computed_(lanes),
      stepped_(lanes),
      // The next forward reads weights that another lane may still be stepping; without an MLP the one that begins the
      // step takes all of it.
      waits_for_steps_(lanes > 1 && (model.plan().mlp || sync)),
      sync_(sync) {
  const InputPlan& plan = model.plan().input;
  demand(lanes > 0, "at least one lane");
  demand(tables.size() == plan.groups.size() && store.groups() == plan.groups.size(),
         "tables and a store of the model's groups");
  for (size_t g = 0; g < tables.size(); g++) {
    demand(tables[g].size() == plan.groups[g].features.size(), "a table for each feature");
    demand(store.layout(static_cast<uint32_t>(g)).width() == static_cast<uint32_t>(plan.groups[g].slots),
           "rows as wide as the model reads");
    copies_.emplace_back(store.spec().groups[g].slots, false, false);
  }
  for (uint32_t i = 0; i < lanes; i++) {
    lanes_.push_back(std::make_unique<Lane>(store, model, tables, in_steps));
    lanes_.back()->dense = static_cast<int64_t>(dense());
    all_.push_back(&lanes_.back()->hedge);
  }
}

HedgeLoop::~HedgeLoop() = default;

void HedgeLoop::abort() {
  computed_.abort();
  stepped_.abort();
}

const std::vector<LoopKept>& HedgeLoop::kept(uint32_t lane) const { return lanes_.at(lane)->kept; }

void HedgeLoop::check(const LoopSamples& samples, const LoopBatches& batches) const {
  int64_t last = 0, range = 0;
  for (size_t i = 0; i < batches.count; i++) {
    demand(batches.ends[i] >= last && batches.ends[i] <= samples.size,
           "ends of batches that rise, to the number of samples at most");
    demand(batches.range_ends[i] > range, "a range for each batch");
    last = batches.ends[i];
    range = batches.range_ends[i];
  }
  if (!batches.count) return;
  demand(samples.groups.size() == lanes_.front()->work.size(), "keys of each group");
  for (size_t g = 0; g < samples.groups.size(); g++) {
    const LoopGroup& from = samples.groups[g];
    demand(from.ends.size() == lanes_.front()->work[g].tables.size(), "list ends, or none, of each feature");
    for (size_t f = 0; f < from.ends.size(); f++) {
      const int64_t keys = static_cast<int64_t>(from.starts[f + 1]) - from.starts[f];
      const uint32_t* list = from.ends[f];
      demand(list ? (samples.size ? keys == list[samples.size - 1] : keys == 0) &&
                        std::is_sorted(list, list + samples.size)
                  : keys == samples.size,
             "a key a sample, or list ends that rise to the number of keys");
    }
  }
}

// By the last lane to come, while the others wait.
void HedgeLoop::begin_step() {
  int64_t rows = 0;
  busy_ = more_ = false;
  for (const auto& lane : lanes_) {
    rows += lane->counted;
    busy_ = busy_ || lane->busy;
    more_ = more_ || lane->more;
  }
  if (rows) dense_steps_++;
  model_.begin_step(all_);
}

// False: the gate is broken.
bool HedgeLoop::meet(Lane& lane, Gate& gate, bool begins_step) {
  const Gate::Turn turn = gate.arrive();
  lane.watch->mark(wait_stage);
  if (turn == Gate::broken) return false;
  if (turn == Gate::last) {
    if (begins_step) {
      begin_step();
      lane.watch->mark(step_stage);
    }
    gate.open();
  }
  return true;
}

LoopRan HedgeLoop::run(uint32_t lane, const LoopSamples& samples, const LoopBatches& batches, float* predictions) {
  LoopRan ran;
  try {
    train(lane, samples, batches, predictions, ran);
  } catch (...) {  // whatever it is, the other lanes must not wait for this one; it is thrown on
    abort();
    throw;
  }
  if (ran.ended == LoopRan::unread || ran.ended == LoopRan::not_held) abort();
  return ran;
}

void HedgeLoop::train(uint32_t index, const LoopSamples& samples, const LoopBatches& batches, float* predictions,
                      LoopRan& ran) {
  Lane& lane = *lanes_.at(index);
  lane.kept.clear();
  check(samples, batches);
  const InputPlan& input = model_.plan().input;
  Watch watch(ran.seconds);
  lane.watch = &watch;
  lane.busy = false;
  bool others_busy = false;
  for (size_t step = 0, k = 0;; step++) {
    const auto moment = [&](size_t i) {
      if (batches.moments_ns && k < batches.count) batches.moments_ns[k * LoopBatches::kMoments + i] = wall_ns();
    };
    // A lane's next lookup does not wait for the others' steps, but in mode sync for their pushes. All lanes begin
    // their next batches in one step, so that learning does not depend on how batches are split into runs.
    if (step && sync_ && waits_for_steps_ && !meet(lane, stepped_, false)) return void(ran.ended = LoopRan::broken);
    const bool begins = !lane.busy && k < batches.count && ran.ended == LoopRan::done && !others_busy;
    const int64_t first = k && k <= batches.count ? batches.ends[k - 1] : 0,
                  last = k < batches.count ? batches.ends[k] : 0;
    if (begins) {
      moment(0);
      lane.plan(samples, first, last);
      watch.mark(plan_stage);
      moment(1);
      if (const auto missing = lane.look_up(store_, input, copies_)) {
        ran.ended = missing->unread ? LoopRan::unread : LoopRan::not_held;
        ran.bucket = missing->bucket;
        return;
      }
      if (batches.keep[k]) lane.keep(input, k);
      watch.mark(lookup_stage);
      moment(2);
    }
    if (step && !sync_ && waits_for_steps_ && !meet(lane, stepped_, false)) return void(ran.ended = LoopRan::broken);
    if (begins) lane.begin(samples, first, static_cast<int64_t>(labels()), batches.learn_dense[k], predictions);
    const bool mine = begins || lane.busy;
    lane.counted = 0;
    if (mine && lane.hedge.more()) lane.advance();
    lane.busy = mine && lane.hedge.more();
    lane.more = lane.busy || (ran.ended == LoopRan::done && k + (mine ? 1 : 0) < batches.count);
    if (mine) {
      watch.mark(model_stage);
      moment(3);
    }
    if (!meet(lane, computed_, true)) return void(ran.ended = LoopRan::broken);
    others_busy = busy_;
    const bool goes_on = more_;
    model_.step_part(all_, static_cast<int>(index), static_cast<int>(lanes_.size()));
    watch.mark(step_stage);
    if (mine && !lane.busy) {
      ran.trained++;
      moment(4);
      const size_t range = k ? static_cast<size_t>(batches.range_ends[k - 1]) : 0;
      int64_t clock_ms = 0;
      for (int64_t i = first; i < last; i++) clock_ms = std::max(clock_ms, samples.times_ms[i]);
      const Pushed pushed = lane.push_to(store_, batches.ranges + 3 * range,
                                         static_cast<size_t>(batches.range_ends[k]) - range, clock_ms);
      watch.mark(push_stage);
      moment(5);
      if (pushed == Pushed::refused) {
        ran.ended = LoopRan::refused;  // it joins the remaining steps, without rows
      } else if (pushed == Pushed::unread) {
        ran.ended = LoopRan::unread;
        return;
      } else {
        ran.pushed++;
        ran.skipped += pushed == Pushed::skipped;
      }
      k++;
    }
    if (!goes_on) return;
  }
}

}  // namespace freshet
