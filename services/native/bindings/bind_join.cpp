#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "arrays.hpp"
#include "bindings.hpp"
#include "freshet/join.hpp"

namespace freshet {

namespace {

using join::Joiner;
using join::Key;
using join::Outcome;

template <typename T>
std::span<T> view(const Out<T>& array) {
  return {array.data(), array.size()};
}
// (N, 2) uint64_t, columns high and low.
std::span<const Key> keys(const In2<uint64_t>& array) {
  if (array.shape(1) != 2) throw std::invalid_argument("keys must have the shape (N, 2)");
  return {reinterpret_cast<const Key*>(array.data()), array.shape(0)};
}
std::span<Outcome> outcomes(const Out<uint8_t>& array) {
  return {reinterpret_cast<Outcome*>(array.data()), array.size()};
}

void same_length(size_t length, std::initializer_list<size_t> others) {
  for (const size_t other : others)
    if (other != length) throw std::invalid_argument("columns must have equal length");
}

void on_served(Joiner& self, In<uint8_t> data, In<int64_t> offsets, In<uint64_t> requests, In<uint32_t> schemas,
               In<int64_t> begins, In<int64_t> prefix_ends, In<int64_t> suffix_begins, In<int64_t> ends,
               In<uint32_t> events, In<int64_t> times, In2<uint64_t> impressions, In<int64_t> element_begins,
               In<int64_t> element_ends, Out<uint8_t> out) {
  const join::Impressions batch{view(data),          view(offsets),     view(begins),   view(prefix_ends),
                                view(suffix_begins), view(ends),        view(requests), view(schemas),
                                view(events),        keys(impressions), view(times),    view(element_begins),
                                view(element_ends)};
  same_length(offsets.size(),
              {requests.size(), schemas.size(), begins.size(), prefix_ends.size(), suffix_begins.size(), ends.size()});
  same_length(events.size(),
              {times.size(), impressions.shape(0), element_begins.size(), element_ends.size(), out.size()});
  const nb::gil_scoped_release unlocked;
  self.on_served(batch, outcomes(out));
}

void on_shown(Joiner& self, In<int64_t> offsets, In<int64_t> times, In2<uint64_t> impressions, Out<uint8_t> out) {
  same_length(offsets.size(), {times.size(), impressions.shape(0), out.size()});
  const join::Shown batch{view(offsets), view(times), keys(impressions)};
  const nb::gil_scoped_release unlocked;
  self.on_shown(batch, outcomes(out));
}

void on_actions(Joiner& self, In<int64_t> offsets, In<int64_t> times, In2<uint64_t> impressions, In2<uint64_t> ids,
                In<uint32_t> masks, In2<double> values, Out<uint8_t> out) {
  same_length(offsets.size(),
              {times.size(), impressions.shape(0), ids.shape(0), masks.size(), values.shape(0), out.size()});
  if (values.shape(1) != self.aggregates()) throw std::invalid_argument("values must have a column for each aggregate");
  const join::Actions batch{view(offsets), view(times), keys(impressions),
                            keys(ids),     view(masks), {values.data(), values.size()}};
  const nb::gil_scoped_release unlocked;
  self.on_actions(batch, outcomes(out));
}

void take(Joiner& self, bool late, Out<int64_t> ids, Out<int64_t> times, Out<uint64_t> requests, Out<float> values,
          Out<float> weights, Out<uint8_t> labels, Out<uint32_t> schemas, Out<int64_t> ends, Out<uint8_t> payload,
          Out2<double> aggregates) {
  same_length(ids.size(), {times.size(), requests.size(), values.size(), weights.size(), labels.size(), schemas.size(),
                           ends.size()});
  const join::Samples out{
      view(ids),    view(times),   view(requests), view(values),  view(weights),
      view(labels), view(schemas), view(ends),     view(payload), {aggregates.data(), aggregates.size()}};
  const nb::gil_scoped_release unlocked;
  self.take(late, out);
}

join::Plan plan_of(const std::vector<int64_t>& windows, const std::vector<int32_t>& given,
                   const std::vector<bool>& numeric, const std::vector<uint32_t>& aggregate_labels,
                   const std::vector<int>& aggregate_kinds) {
  same_length(windows.size(), {given.size(), numeric.size()});
  same_length(aggregate_labels.size(), {aggregate_kinds.size()});
  join::Plan plan{};
  for (size_t i = 0; i < windows.size(); ++i) plan.labels.push_back({windows[i], given[i], numeric[i]});
  for (size_t a = 0; a < aggregate_kinds.size(); ++a) {
    if (aggregate_kinds[a] < 0 || aggregate_kinds[a] > static_cast<int>(join::Aggregate::kLast))
      throw std::invalid_argument("an aggregate is 0 sum, 1 count, 2 max, 3 min or 4 last");
    plan.aggregates.push_back({aggregate_labels[a], static_cast<join::Aggregate>(aggregate_kinds[a])});
  }
  return plan;
}

}  // namespace

void bind_join(nb::module_& m) {
  m.def(
      "join_sample_id", [](uint64_t high, uint64_t low, uint32_t label) { return join::sample_id({high, low}, label); },
      nb::arg("high"), nb::arg("low"), nb::arg("label"), "64-bit id of the sample (impression, label).");
  m.def(
      "join_sample_ids",
      [](const In2<uint64_t>& impressions, uint32_t labels) {
        if (labels == 0) throw std::invalid_argument("sample ids: expected at least one label");
        std::vector<int64_t> ids;
        for (const Key& key : keys(impressions))
          for (uint32_t label = 0; label < labels; ++label) ids.push_back(join::sample_id(key, label));
        return to_matrix(std::move(ids), labels);
      },
      nb::arg("keys"), nb::arg("labels"), "Ids of the samples of impressions with (N, 2) keys: (N, labels).");
  m.def("join_kept", &join::kept, nb::arg("sample"), nb::arg("share"), "Whether a negative of this sample id is kept.");
  m.def(
      "join_counters",
      [] {
        return nb::make_tuple(
            std::vector<std::string>(std::begin(join::kLabelCounters), std::end(join::kLabelCounters)),
            std::vector<std::string>(std::begin(join::kEventCounters), std::end(join::kEventCounters)));
      },
      "Names of the counters of a label, and of those that count events.");

  nb::class_<Joiner>(m, "JoinState", "State and decisions of the join of one partition; used by one thread at a time.")
      .def(
          "__init__",
          [](Joiner* self, const std::vector<int64_t>& windows, const std::vector<int32_t>& given,
             const std::vector<bool>& numeric, const std::vector<uint32_t>& aggregate_labels,
             const std::vector<int>& aggregate_kinds, int64_t grace_ms, bool require_shown, bool early,
             double negatives, int64_t ramp) {
            join::Plan plan = plan_of(windows, given, numeric, aggregate_labels, aggregate_kinds);
            plan.grace_ms = grace_ms;
            plan.require_shown = require_shown;
            plan.early = early;
            plan.negatives = negatives;
            plan.warm_up_waits = ramp;
            new (self) Joiner(std::move(plan));
          },
          nb::arg("windows_ms"), nb::arg("given"), nb::arg("numeric"), nb::arg("aggregate_labels"),
          nb::arg("aggregate_kinds"), nb::arg("grace_ms"), nb::arg("require_shown"), nb::arg("early"),
          nb::arg("negatives"), nb::arg("ramp") = 0)
      .def("on_served", &on_served, nb::arg("data"), nb::arg("offsets"), nb::arg("requests"), nb::arg("schemas"),
           nb::arg("begins"), nb::arg("prefix_ends"), nb::arg("suffix_begins"), nb::arg("ends"), nb::arg("events"),
           nb::arg("times"), nb::arg("keys"), nb::arg("element_begins"), nb::arg("element_ends"), nb::arg("outcomes"))
      .def("on_shown", &on_shown, nb::arg("offsets"), nb::arg("times"), nb::arg("keys"), nb::arg("outcomes"))
      .def("on_actions", &on_actions, nb::arg("offsets"), nb::arg("times"), nb::arg("keys"), nb::arg("ids"),
           nb::arg("masks"), nb::arg("values"), nb::arg("outcomes"))
      .def("advance", &Joiner::advance, nb::arg("watermark"), nb::call_guard<nb::gil_scoped_release>())
      .def("due", &Joiner::due, nb::arg("watermark"))
      .def("restart_at", &Joiner::restart_at, nb::arg("watermark"))
      .def("set_back", &Joiner::set_back, nb::arg("watermark"))
      .def("end_recall", &Joiner::end_recall)
      .def("begin_at", &Joiner::begin_at, nb::arg("began"))
      .def_prop_ro("began",
                   [](const Joiner& self) {
                     return self.began() == join::kNotBegun ? std::nullopt : std::optional<int64_t>(self.began());
                   })
      .def(
          "ready",
          [](const Joiner& self, bool late) {
            const join::Size size = self.ready(late);
            return nb::make_tuple(size.samples, size.bytes);
          },
          nb::arg("late"))
      .def("take", &take, nb::arg("late"), nb::arg("ids"), nb::arg("times"), nb::arg("requests"), nb::arg("values"),
           nb::arg("weights"), nb::arg("labels"), nb::arg("schemas"), nb::arg("ends"), nb::arg("payload"),
           nb::arg("aggregates"))
      .def(
          "no_value",
          [](Joiner& self, size_t label, bool matched) {
            if (label >= self.labels()) throw std::invalid_argument("no such label");
            self.no_value(label, matched);
          },
          nb::arg("label"), nb::arg("matched"))
      .def("discard", &Joiner::discard)
      .def("low", &Joiner::low, nb::arg("topic"), nb::arg("next"))
      .def(
          "counters", [](const Joiner& self, Out<int64_t> out) { self.counters(view(out)); }, nb::arg("out"))
      .def(
          "set_counters", [](Joiner& self, In<int64_t> in) { self.set_counters(view(in)); }, nb::arg("counters"))
      .def(
          "pending",
          [](const Joiner& self, Out<int64_t> out) {
            same_length(out.size(), {self.labels()});
            self.pending(view(out));
          },
          nb::arg("out"))
      .def_prop_ro("waiting", &Joiner::waiting)
      .def_prop_ro("ids", &Joiner::ids)
      .def_prop_ro("payload_bytes", &Joiner::payload_bytes)
      .def_prop_ro("horizon_ms", &Joiner::horizon_ms);
}

}  // namespace freshet
