#include "freshet/request_scorer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace freshet {
namespace {

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("request scorer: expected ") + what);
}

using ScoreOp = ScoreStep::Op;

size_t operands(ScoreOp op) {
  return op == ScoreOp::kNumber || op == ScoreOp::kLabel ? 0 : op == ScoreOp::kNegate ? 1 : 2;
}

void check_steps(const std::vector<ScoreStep>& score) {
  size_t depth = 0;
  for (const ScoreStep& step : score) {
    demand(step.op <= ScoreOp::kNegate && depth >= operands(step.op), "steps of a score whose operands are there");
    depth += 1 - operands(step.op);
    demand(depth <= RequestScorer::kDepth, "a score of fewer numbers at a time");
  }
  demand(depth == 1, "a score that leaves one number");
}

}  // namespace

RequestScorer::RequestScorer(const RequestPlan& plan, const Program& program, std::vector<std::vector<uint8_t>> tables,
                             std::vector<std::vector<uint8_t>> shared, std::vector<ScoreStep> score, uint32_t buckets)
    : plan_(plan), program_(program), score_(std::move(score)) {
  check_steps(score_);
  demand(tables.size() == shared.size() && tables.size() == plan.decode.groups.size(),
         "tables and what is shared of each group");
  for (size_t g = 0; g < tables.size(); g++) {
    demand(tables[g].size() == shared[g].size() && tables[g].size() == plan.decode.groups[g].size(),
           "a table for each feature");
    features_ += tables[g].size();
    Work& work = work_.emplace_back(buckets);
    work.tables = std::move(tables[g]);
    work.shared = std::move(shared[g]);
  }
}

// Rows of every group, as the view's; false if a bucket is not held.
bool RequestScorer::look_up(Store& store, const InputPlan& input, const DecodedRequests& made) {
  view_.groups.resize(work_.size());
  for (size_t g = 0; g < work_.size(); g++) {
    Work& work = work_[g];
    const DecodedGroup& from = made.groups[g];
    const size_t features = work.tables.size(), width = static_cast<size_t>(input.groups[g].slots);
    work.plan.run(from.keys.data.get(), from.keys.size, from.feature_starts.data(), work.tables.data(), features);
    const size_t unique = work.plan.unique();
    const Keys keys{work.plan.keys.data(), work.plan.tables.data(), unique, work.plan.bucket_starts.data()};
    float* rows = work.rows.reserve(unique * width);
    if (store.lookup(static_cast<uint32_t>(g), keys, rows, false, work.found.reserve(unique))) return false;
    GroupView& view = view_.groups[g];
    view.rows = rows;
    view.unique = static_cast<int64_t>(unique);
    view.positions = work.plan.positions.data();
    view.occurrences = static_cast<int64_t>(work.plan.occurrences());
    view.starts = from.feature_starts.data();
    view.shared = work.shared.data();
    view.ends.clear();
    for (const int64_t list : from.lists)
      view.ends.push_back(list < 0 ? nullptr : made.list_ends[static_cast<size_t>(list)].data.get());
  }
  return true;
}

// One sample's score. Sums, differences and products only: a value that is not finite stays so to the end.
float RequestScorer::score_of(const float* predictions) const {
  double stack[kDepth + 1];
  size_t top = 0;
  for (const ScoreStep& step : score_) {
    switch (step.op) {
      case ScoreOp::kNumber:
        stack[top++] = step.number;
        break;
      case ScoreOp::kLabel:
        stack[top++] = static_cast<double>(predictions[static_cast<size_t>(step.number)]);
        break;
      case ScoreOp::kAdd:
        top--, stack[top - 1] += stack[top];
        break;
      case ScoreOp::kSubtract:
        top--, stack[top - 1] -= stack[top];
        break;
      case ScoreOp::kMultiply:
        top--, stack[top - 1] *= stack[top];
        break;
      case ScoreOp::kNegate:
        stack[top - 1] = -stack[top - 1];
        break;
    }
  }
  return std::isfinite(stack[0]) ? static_cast<float>(stack[0]) : std::numeric_limits<float>::quiet_NaN();
}

// Add one group's part: (R, F) counts, from column `first_feature` on, and keys that may be on disk.
void RequestScorer::count_missing(size_t group, size_t first_feature, ScoredRequests& out) {
  const GroupView& view = view_.groups[group];
  const Work& work = work_[group];
  const uint8_t* found = work.found.data();
  unread_.clear();
  for (size_t f = 0; f < view.ends.size(); f++) {
    uint32_t sample = 0;
    for (size_t r = 0; r < request_ends_.size(); r++) {
      const uint32_t candidates = request_ends_[r] - (r ? request_ends_[r - 1] : 0);
      const uint32_t first = view.shared[f] ? static_cast<uint32_t>(r) : sample,
                     last = first + (view.shared[f] ? 1 : candidates);
      const uint32_t* ends = view.ends[f];
      const uint32_t begin = ends ? (first ? ends[first - 1] : 0) : first,
                     end = ends ? (last ? ends[last - 1] : 0) : last;
      int64_t missing = 0;
      for (uint32_t o = begin; o < end; o++) {
        const int32_t p = view.positions[view.starts[f] + o];
        if (p < 0 || found[p] == kHere) continue;
        missing++;
        if (found[p] == kPerhapsOnDisk) unread_.emplace_back(static_cast<uint32_t>(r), p);
      }
      out.without_row[r * features_ + first_feature + f] = view.shared[f] ? missing * candidates : missing;
      sample += candidates;
    }
  }
  std::sort(unread_.begin(), unread_.end());
  unread_.erase(std::unique(unread_.begin(), unread_.end()), unread_.end());
  for (const auto& [request, p] : unread_) {
    out.unread_requests.push_back(request);
    out.unread_tables.push_back(work.plan.tables.data()[p]);
    out.unread_keys.push_back(work.plan.keys.data()[p]);
  }
}

std::optional<ScoredRequests> RequestScorer::score(Store& store, const HedgeModel& model, HedgeLane& lane,
                                                   std::span<const uint8_t> data, std::span<const int64_t> ends,
                                                   std::span<const uint32_t> counts) {
  const InputPlan& input = model.plan().input;
  demand(input.groups.size() == work_.size() && store.groups() == work_.size(),
         "a store and a model of the same groups");
  for (size_t g = 0; g < work_.size(); g++)
    demand(store.layout(static_cast<uint32_t>(g)).width() == static_cast<uint32_t>(input.groups[g].slots) &&
               input.groups[g].features.size() == work_[g].tables.size() && store.buckets() == work_[g].plan.buckets(),
           "rows as wide as the model reads, and its features");
  demand(input.dense.size() == plan_.decode.log1p.size(), "the model's dense columns");
  const size_t labels = static_cast<size_t>(model.labels());
  for (const ScoreStep& step : score_)
    demand(step.op != ScoreOp::kLabel || (step.number >= 0 && step.number < static_cast<double>(labels)),
           "labels that the model has");
  DecodedRequests made = decode_requests(plan_, program_, data, ends, counts);
  if (!made.bad.empty() || !look_up(store, input, made)) return std::nullopt;
  ScoredRequests out;
  request_ends_.clear();
  uint32_t end = 0;
  for (const uint32_t count : counts) request_ends_.push_back(end += count);
  view_.size = static_cast<int64_t>(made.size);
  view_.request_ends = request_ends_.data();
  view_.requests = static_cast<int64_t>(request_ends_.size());
  view_.dense = made.dense.begin();
  out.predictions.resize(made.size * labels);
  lane.score(view_, out.predictions.data());
  out.scores.resize(made.size);
  for (size_t b = 0; b < made.size; b++) out.scores[b] = score_of(out.predictions.data() + b * labels);
  const auto lacks = [](const Work& work) {
    const uint8_t* found = work.found.data();
    return !std::all_of(found, found + work.plan.unique(), [](uint8_t one) { return one == kHere; });
  };
  size_t first = 0;
  for (size_t g = 0; g < work_.size(); first += work_[g++].tables.size()) {
    if (!lacks(work_[g])) continue;
    if (out.without_row.empty()) out.without_row.assign(counts.size() * features_, 0);
    count_missing(g, first, out);
  }
  return out;
}

}  // namespace freshet
