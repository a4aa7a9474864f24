#include "freshet/pass.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace freshet {
namespace {

void demand(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("pass: expected " + what);
}

}  // namespace

Pass::Pass(Store& store, HedgeModel& model, std::vector<std::vector<u8>> tables)
    : store_(store),
      model_(model),
      lane_(model, true),
      losses_(static_cast<size_t>(model.labels() * model.experts())),
      rows_(static_cast<size_t>(model.labels())) {
  const InputPlan& plan = model.plan().input;
  demand(tables.size() == plan.groups.size() && store.groups() == plan.groups.size(), "tables and a store of the model's groups");
  for (size_t g = 0; g < tables.size(); g++) {
    demand(tables[g].size() == plan.groups[g].features.size(), "a table for each feature");
    demand(store.layout(static_cast<u32>(g)).width() == static_cast<u32>(plan.groups[g].slots), "rows as wide as the model reads");
    Work& work = work_.emplace_back(store.buckets());
    work.ends.resize(tables[g].size());
    work.tables = std::move(tables[g]);
  }
}

void Pass::run(const PassSamples& samples, const i64* ends, size_t batches, float* predictions) {
  check(samples, ends, batches);
  for (size_t i = 0; i < batches; i++) train(samples, i ? ends[i - 1] : 0, ends[i], predictions);
}

void Pass::check(const PassSamples& samples, const i64* ends, size_t batches) const {
  i64 last = 0;
  for (size_t i = 0; i < batches; last = ends[i++]) demand(ends[i] > last, "ends of batches that rise");
  demand(last == samples.size, "batches that end with the samples");
  demand(samples.groups.size() == work_.size(), "keys of each group");
  for (size_t g = 0; g < work_.size(); g++) {
    const PassGroup& from = samples.groups[g];
    demand(from.ends.size() == work_[g].tables.size(), "list ends, or none, of each feature");
    for (size_t f = 0; f < from.ends.size(); f++) {
      const i64 keys = static_cast<i64>(from.starts[f + 1]) - from.starts[f];
      const u32* list = from.ends[f];
      demand(list ? (samples.size ? keys == list[samples.size - 1] : keys == 0) && std::is_sorted(list, list + samples.size)
                  : keys == samples.size,
             "a key a sample, or list ends that rise to the number of keys");
    }
  }
}

// The keys of samples [first, last) of one group, in memory of their own: a plan takes them feature-major.
void Pass::gather(const PassGroup& from, size_t group, i64 first, i64 last) {
  Work& work = work_[group];
  const size_t features = work.tables.size();
  u32* starts = work.starts.reserve(features + 1);
  const auto span = [&](size_t f) {
    const u32* list = from.ends[f];
    if (!list) return std::pair<u32, u32>(static_cast<u32>(first), static_cast<u32>(last));
    return std::pair<u32, u32>(first ? list[first - 1] : 0, list[last - 1]);
  };
  starts[0] = 0;
  for (size_t f = 0; f < features; f++) starts[f + 1] = starts[f] + (span(f).second - span(f).first);
  u64* keys = work.keys.reserve(starts[features]);
  GroupView& view = view_.groups[group];
  for (size_t f = 0; f < features; f++) {
    const auto [begin, end] = span(f);
    std::copy(from.keys + from.starts[f] + begin, from.keys + from.starts[f] + end, keys + starts[f]);
    view.ends[f] = nullptr;
    if (!from.ends[f]) continue;
    u32* ends = work.ends[f].reserve(static_cast<size_t>(last - first));
    for (i64 i = first; i < last; i++) ends[i - first] = from.ends[f][i] - begin;
    view.ends[f] = ends;
  }
  work.plan.run(keys, starts[features], starts, work.tables.data(), features);
}

void Pass::train(const PassSamples& samples, i64 first, i64 last, float* predictions) {
  const InputPlan& plan = model_.plan().input;
  view_.size = last - first;
  view_.groups.resize(work_.size());
  push_.resize(work_.size());
  for (size_t g = 0; g < work_.size(); g++) {
    Work& work = work_[g];
    GroupView& view = view_.groups[g];
    view.ends.resize(work.tables.size());
    gather(samples.groups[g], g, first, last);
    const size_t unique = work.plan.unique(), width = static_cast<size_t>(plan.groups[g].slots);
    const Keys keys{work.plan.keys.data(), work.plan.tables.data(), unique, work.plan.bucket_starts.data()};
    float* rows = work.rows.reserve(unique * width);
    if (store_.lookup(static_cast<u32>(g), keys, rows, true, nullptr)) throw std::logic_error("pass: a bucket of the store is not held");
    view.rows = rows;
    view.unique = static_cast<i64>(unique);
    view.positions = work.plan.positions.data();
    view.occurrences = static_cast<i64>(work.plan.occurrences());
    view.starts = work.starts.data();
    view.gradients = work.gradients.reserve(unique * width);
    push_[g] = {static_cast<u32>(g), keys, view.gradients};
  }
  view_.dense = samples.dense + first * static_cast<i64>(plan.dense.size());
  view_.label = samples.label + first;
  view_.value = samples.value + first;
  view_.weight = samples.weight + first;
  lane_.forward_backward(view_, true, predictions + first * model_.labels(), losses_.data(), rows_.data());
  model_.step({&lane_});
  const i64 range[3] = {0, next_, next_ + 1};
  const i64 clock_ms = std::max<i64>(0, *std::max_element(samples.times_ms + first, samples.times_ms + last));
  if (store_.push(range, 1, clock_ms, push_) != Pushed::applied)
    throw std::logic_error("pass: the store has been pushed to by somebody else");
  next_++;
}

}  // namespace freshet
