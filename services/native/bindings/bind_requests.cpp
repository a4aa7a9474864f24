// Requests: served impressions, decoded with the shared fields of their candidates kept once; and scored.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/feature_requests.hpp"
#include "freshet/request_scorer.hpp"

namespace freshet {
namespace {

nb::tuple decode(const RequestPlan& plan, const Program& program, const In<uint8_t>& data, const In<int64_t>& ends,
                 const In<uint32_t>& counts) {
  DecodedRequests made;
  {
    nb::gil_scoped_release release;
    made = decode_requests(plan, program, view(data), view(ends), view(counts));
  }
  nb::list groups, list_ends;
  for (auto& g : made.groups)
    groups.append(
        nb::make_tuple(to_numpy(std::move(g.keys)), to_numpy(std::move(g.feature_starts)), nb::cast(g.lists)));
  for (auto& e : made.list_ends) list_ends.append(to_numpy(std::move(e)));
  std::vector<int64_t> bad;
  for (const auto& b : made.bad)
    bad.insert(bad.end(), {b.index, b.program, static_cast<int64_t>(b.failure.why), b.failure.node, b.failure.offset});
  return nb::make_tuple(made.size, groups, list_ends, to_numpy(std::move(made.dense)), to_matrix(std::move(bad), 5));
}

nb::object score(RequestScorer& scorer, Store& store, const HedgeModel& model, HedgeLane& lane, const In<uint8_t>& data,
                 const In<int64_t>& ends, const In<uint32_t>& counts) {
  std::optional<ScoredRequests> made;
  {
    nb::gil_scoped_release release;
    made = scorer.score(store, model, lane, view(data), view(ends), view(counts));
  }
  if (!made) return nb::none();
  nb::object without_row = nb::none();
  if (!made->without_row.empty()) without_row = to_matrix(std::move(made->without_row), scorer.features());
  nb::object unread = nb::none();
  if (!made->unread_keys.empty())
    unread = nb::make_tuple(to_numpy(std::move(made->unread_requests)), to_numpy(std::move(made->unread_tables)),
                            to_numpy(std::move(made->unread_keys)));
  return nb::make_tuple(to_matrix(std::move(made->predictions), static_cast<size_t>(model.labels())),
                        to_numpy(std::move(made->scores)), without_row, unread);
}

}  // namespace

void bind_requests(nb::module_& m) {
  nb::class_<RequestPlan>(m, "RequestPlan")
      .def("__init__",
           [](RequestPlan* self, const DecodePlan& decode, bool explode, bool time_in_element,
              std::vector<uint8_t> columns, std::vector<uint8_t> lists, std::vector<uint8_t> dense,
              std::vector<uint8_t> parts) {
             RequestPlan plan{decode,           explode,          time_in_element, std::move(columns),
                              std::move(lists), std::move(dense), std::move(parts)};
             plan.check();
             new (self) RequestPlan(std::move(plan));
           })
      .def("check", nb::overload_cast<const Program&>(&RequestPlan::check, nb::const_),
           "Raises ValueError if a sink of the program does not fit.");
  m.def("decode_requests", &decode);
  nb::class_<RequestScorer>(m, "RequestScorer", "Rank requests to predictions in one call.")
      .def(
          "__init__",
          [](RequestScorer* self, const RequestPlan& plan, const Program& program,
             std::vector<std::vector<uint8_t>> tables, std::vector<std::vector<uint8_t>> shared,
             const std::vector<std::tuple<uint32_t, double>>& score, uint32_t buckets) {
            std::vector<ScoreStep> steps;
            for (const auto& [op, number] : score) steps.push_back({static_cast<ScoreStep::Op>(op), number});
            new (self) RequestScorer(plan, program, std::move(tables), std::move(shared), std::move(steps), buckets);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("score", &score,
           "Predictions, scores, and values without a row if there are any; None if a record or a bucket is not good.");
}

}  // namespace freshet
