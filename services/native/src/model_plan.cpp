#include "freshet/model_plan.hpp"

#include <stdexcept>
#include <string>

namespace freshet {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("model inputs: " + why); }

void check_requests(const BatchView& batch) {
  uint32_t last = 0;
  for (int64_t r = 0; r < batch.requests; ++r) {
    if (batch.request_ends[r] < last) refuse("request_ends must not fall");
    last = batch.request_ends[r];
  }
  if (last != batch.size) refuse("request_ends must end at the number of samples");
}

void check_group(const GroupPlan& plan, const GroupView& g, const BatchView& batch, const std::string& where) {
  const size_t features = plan.features.size();
  if (g.ends.size() != features) refuse(where + ": expected list_ends for " + std::to_string(features) + " features");
  if (g.starts[0] != 0 || g.starts[features] != g.occurrences)
    refuse(where + ": feature_starts must begin at 0 and end at the number of occurrences");
  for (size_t f = 0; f < features; ++f) {
    const int64_t count = static_cast<int64_t>(g.starts[f + 1]) - g.starts[f];
    if (count < 0) refuse(where + ": feature_starts must not fall");
    const int64_t size = g.shared && g.shared[f] ? batch.requests : batch.size;
    if (g.ends[f] == nullptr) {
      if (count != size)
        refuse(where + ": a feature of single values must have one occurrence a sample, or a request if it is shared");
      continue;
    }
    uint32_t last = 0;
    for (int64_t b = 0; b < size; ++b) {
      if (g.ends[f][b] < last) refuse(where + ": list_ends must not fall");
      last = g.ends[f][b];
    }
    if (last != count) refuse(where + ": list_ends must end at the feature's number of occurrences");
  }
  // One reduction without a branch: -1 becomes the largest unsigned value, which + 1 wraps to 0.
  uint32_t largest = 0;
  for (int64_t i = 0; i < g.occurrences; ++i) {
    const uint32_t p = static_cast<uint32_t>(g.positions[i]) + 1u;
    largest = p > largest ? p : largest;
  }
  if (largest > g.unique) refuse(where + ": a position is not in [-1, " + std::to_string(g.unique) + ")");
}

}  // namespace

void check(const InputPlan& plan, const BatchView& batch, int labels) {
  if (batch.groups.size() != plan.groups.size())
    refuse("expected " + std::to_string(plan.groups.size()) + " groups, found " + std::to_string(batch.groups.size()));
  if (batch.request_ends) check_requests(batch);
  for (size_t i = 0; i < plan.groups.size(); ++i)
    check_group(plan.groups[i], batch.groups[i], batch, "group " + std::to_string(i));
  if (batch.label == nullptr) return;
  for (int64_t b = 0; b < batch.size; ++b)
    if (batch.label[b] >= labels)
      refuse("label index " + std::to_string(batch.label[b]) + " of a spec with " + std::to_string(labels) + " labels");
}

void check(const InputPlan& plan) {
  const auto demand = [](bool ok, const char* what) {
    if (!ok) refuse(std::string("plan: ") + what);
  };
  const int dense = static_cast<int>(plan.dense.size());
  demand(plan.width % 16 == 0 && plan.vectors_from % 16 == 0, "width and vectors_from must be multiples of 16");
  demand(dense <= plan.vectors_from && plan.vectors_from <= plan.width, "dense columns must precede the vectors");
  for (const DensePlan& d : plan.dense) demand(d.flag < plan.vectors_from, "a flag lies behind vectors_from");
  for (const GroupPlan& g : plan.groups) {
    demand(g.slots > 0 && g.scalar_slot >= 0 && g.scalars >= 0 && g.scalar_slot + g.scalars <= g.slots,
           "scalars leave the row");
    demand(g.count_slot < g.slots, "a count leaves the row");
    demand(g.scalar_first >= 0 && g.scalar_first + g.scalars <= plan.scalars, "scalars leave the canonical run");
    demand(g.dim >= 0 && g.vector_slot >= 0 && g.vector_slot + g.dim <= g.slots, "a vector leaves the row");
    demand(g.sum + (g.sum < 0 ? 0 : g.dim) <= plan.sums, "an FM sum leaves the sums");
    for (const FeaturePlan& f : g.features)
      demand(f.column < 0 || (f.column >= plan.vectors_from && f.column + g.dim <= plan.width),
             "a vector leaves the input");
  }
}

}  // namespace freshet
