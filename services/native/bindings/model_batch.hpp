// What the bindings of the dense part share: plans from tuples, batches from numpy arrays.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "freshet/model_plan.hpp"

namespace freshet {

using FeatureTuple = std::tuple<int, bool>;
using GroupTuple = std::tuple<int, int, int, int, int, int, int, int, std::vector<FeatureTuple>>;
using InputTuple = std::tuple<int, int, int, int, std::vector<std::tuple<bool, int>>, std::vector<GroupTuple>>;

inline InputPlan input_plan(const InputTuple& from) {
  InputPlan plan;
  plan.width = std::get<0>(from);
  plan.vectors_from = std::get<1>(from);
  plan.scalars = std::get<2>(from);
  plan.sums = std::get<3>(from);
  for (const auto& [standard, flag] : std::get<4>(from)) plan.dense.push_back({standard, flag});
  for (const auto& [slots, scalar_slot, scalar_first, scalars, vector_slot, dim, count_slot, sum, features] :
       std::get<5>(from)) {
    GroupPlan group{slots, scalar_slot, scalar_first, scalars, vector_slot, dim, count_slot, sum, {}};
    for (const auto& [column, mean] : features) group.features.push_back({column, mean});
    plan.groups.push_back(std::move(group));
  }
  check(plan);
  return plan;
}

// Requests whose samples follow each other, and the features with one occurrence (or list) a request.
struct Sharing {
  In<uint32_t> request_ends;        // (R,)
  std::vector<In<uint8_t>> shared;  // per group (features,)
};

// The numpy arrays of a batch, held for as long as native code reads them.
struct Batch {
  BatchView view;
  const Sharing* sharing;
  std::vector<In2<float>> rows;
  std::vector<Out2<float>> gradients;
  std::vector<In<int32_t>> positions;
  std::vector<In<uint32_t>> counts;

  Batch(const InputPlan& plan, nb::list groups, In2<float> dense, int64_t size, const Sharing* with = nullptr)
      : sharing(with) {
    view.size = size;
    if (sharing) {
      if (sharing->shared.size() != plan.groups.size())
        throw std::invalid_argument("model inputs: expected what each group shares");
      view.request_ends = sharing->request_ends.data();
      view.requests = static_cast<int64_t>(sharing->request_ends.shape(0));
    }
    if (static_cast<int64_t>(dense.shape(0)) != size || dense.shape(1) != plan.dense.size())
      throw std::invalid_argument("model inputs: expected dense numbers (" + std::to_string(size) + ", " +
                                  std::to_string(plan.dense.size()) + "), found (" + std::to_string(dense.shape(0)) +
                                  ", " + std::to_string(dense.shape(1)) + ")");
    if (nb::len(groups) != plan.groups.size())
      throw std::invalid_argument("model inputs: expected " + std::to_string(plan.groups.size()) + " groups");
    view.dense = dense.data();
    for (size_t g = 0; g < plan.groups.size(); ++g) add(plan.groups[g], nb::cast<nb::tuple>(groups[g]), size);
  }

  void add(const GroupPlan& plan, nb::tuple from, int64_t size) {
    const size_t features = plan.features.size();
    rows.push_back(nb::cast<In2<float>>(from[0]));
    positions.push_back(nb::cast<In<int32_t>>(from[1]));
    counts.push_back(nb::cast<In<uint32_t>>(from[2]));
    if (rows.back().shape(1) != static_cast<size_t>(plan.slots))
      throw std::invalid_argument("model inputs: expected rows of " + std::to_string(plan.slots) + " floats, found " +
                                  std::to_string(rows.back().shape(1)));
    if (counts.back().shape(0) != features + 1)
      throw std::invalid_argument("model inputs: expected features + 1 feature_starts");
    GroupView group;
    group.rows = rows.back().data();
    group.unique = static_cast<int64_t>(rows.back().shape(0));
    group.positions = positions.back().data();
    group.occurrences = static_cast<int64_t>(positions.back().shape(0));
    group.starts = counts.back().data();
    if (sharing) {
      const auto& shared = sharing->shared[view.groups.size()];
      if (shared.shape(0) != features)
        throw std::invalid_argument("model inputs: expected a flag of sharing for each feature");
      group.shared = shared.data();
    }
    for (const nb::handle ends : nb::cast<nb::sequence>(from[3])) {
      if (ends.is_none()) {
        group.ends.push_back(nullptr);
        continue;
      }
      counts.push_back(nb::cast<In<uint32_t>>(ends));
      const size_t f = group.ends.size();
      const int64_t lists = group.shared && f < features && group.shared[f] ? view.requests : size;
      if (static_cast<int64_t>(counts.back().shape(0)) != lists)
        throw std::invalid_argument("model inputs: expected a list end a sample");
      group.ends.push_back(counts.back().data());
    }
    view.groups.push_back(std::move(group));
  }

  void write_to(const InputPlan& plan, nb::list arrays) {
    if (nb::len(arrays) != plan.groups.size()) throw std::invalid_argument("gradients: expected one array a group");
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      gradients.push_back(nb::cast<Out2<float>>(arrays[g]));
      if (gradients.back().shape(0) != rows[g].shape(0) || gradients.back().shape(1) != rows[g].shape(1))
        throw std::invalid_argument("gradients: expected the shape of the group's rows");
      view.groups[g].gradients = gradients.back().data();
    }
  }
};

}  // namespace freshet
