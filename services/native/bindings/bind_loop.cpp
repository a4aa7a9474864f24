#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "freshet/hedge_loop.hpp"

namespace freshet {

namespace {

void expect(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

nb::tuple tuple_of(const LoopRan& ran) {
  return nb::make_tuple(static_cast<int>(ran.ended), ran.trained, ran.pushed, ran.skipped, ran.bucket,
                        std::vector<double>(ran.seconds.begin(), ran.seconds.end()));
}

// groups: (keys, feature starts, list ends or None of each feature) of each store group.
nb::tuple run(HedgeLoop& loop, uint32_t lane, const std::vector<nb::tuple>& groups, In2<float> dense, In<uint8_t> label,
              In<float> value, In<float> weight, In<int64_t> times_ms, In<int64_t> ends, In2<int64_t> ranges,
              In<int64_t> range_ends, In<uint8_t> learn_dense, In<uint8_t> keep, Out2<float> predictions,
              std::optional<Out2<int64_t>> moments) {
  expect(lane < loop.lanes(), "no such lane");
  LoopSamples samples;
  LoopBatches batches;
  const size_t n = label.size();
  samples.size = static_cast<int64_t>(n);
  expect(value.size() == n && weight.size() == n && times_ms.size() == n,
         "label, value, weight and times differ in length");
  expect(dense.shape(0) == n && dense.shape(1) == loop.dense(), "dense must be (samples, dense columns)");
  expect(predictions.shape(0) == n && predictions.shape(1) == loop.labels(), "predictions must be (samples, labels)");
  batches.count = ends.size();
  expect(range_ends.size() == batches.count && learn_dense.size() == batches.count && keep.size() == batches.count,
         "ends, range_ends, learn_dense and keep differ in length");
  expect(ranges.shape(1) == 3, "a range is partition, start, stop");
  expect(batches.count == 0 || static_cast<size_t>(range_ends.data()[batches.count - 1]) == ranges.shape(0),
         "range_ends must end with the ranges");
  expect(!moments || (moments->shape(0) == batches.count && moments->shape(1) == LoopBatches::kMoments),
         "moments must be (batches, 6)");
  samples.dense = dense.data();
  samples.label = label.data();
  samples.value = value.data();
  samples.weight = weight.data();
  samples.times_ms = times_ms.data();
  batches.ends = ends.data();
  batches.ranges = ranges.data();
  batches.range_ends = range_ends.data();
  batches.learn_dense = learn_dense.data();
  batches.keep = keep.data();
  batches.moments_ns = moments ? moments->data() : nullptr;
  std::vector<In<uint32_t>> held;  // keeps the arrays while native code reads them
  std::vector<In<uint64_t>> held_keys;
  for (const nb::tuple& from : groups) {
    LoopGroup group;
    held_keys.push_back(nb::cast<In<uint64_t>>(from[0]));
    held.push_back(nb::cast<In<uint32_t>>(from[1]));
    group.keys = held_keys.back().data();
    group.starts = held.back().data();
    const nb::sequence lists = nb::cast<nb::sequence>(from[2]);
    expect(held.back().size() == nb::len(lists) + 1, "feature starts must hold one more than features");
    expect(group.starts[nb::len(lists)] == held_keys.back().size(), "feature starts must end with the keys");
    for (const nb::handle list : lists) {
      if (list.is_none()) {
        group.ends.push_back(nullptr);
        continue;
      }
      held.push_back(nb::cast<In<uint32_t>>(list));
      expect(held.back().size() == n, "a list end a sample");
      group.ends.push_back(held.back().data());
    }
    samples.groups.push_back(std::move(group));
  }
  LoopRan ran;
  {
    const nb::gil_scoped_release release;
    ran = loop.run(lane, samples, batches, predictions.data());
  }
  return tuple_of(ran);
}

nb::tuple join(HedgeLoop& loop, uint32_t lane) {
  expect(lane < loop.lanes(), "no such lane");
  LoopRan ran;
  {
    const nb::gil_scoped_release release;
    ran = loop.run(lane, {}, {}, nullptr);
  }
  return tuple_of(ran);
}

// (batch, per group (rows (U, S), positions, feature starts, list ends or None of each feature)) of each batch that was
// kept.
nb::list kept(const HedgeLoop& loop, uint32_t lane) {
  expect(lane < loop.lanes(), "no such lane");
  nb::list all;
  for (const LoopKept& from : loop.kept(lane)) {
    nb::list groups;
    for (size_t g = 0; g < from.groups.size(); g++) {
      LoopKept::Group group = from.groups[g];
      nb::list ends;
      for (auto& list : group.ends) {
        if (list.empty())
          ends.append(nb::none());
        else
          ends.append(to_numpy(std::move(list)));
      }
      groups.append(nb::make_tuple(to_matrix(std::move(group.rows), loop.slots(g)),
                                   to_numpy(std::move(group.positions)), to_numpy(std::move(group.starts)), ends));
    }
    all.append(nb::make_tuple(from.batch, groups));
  }
  return all;
}

}  // namespace

void bind_loop(nb::module_& m) {
  nb::class_<HedgeLoop>(m, "HedgeLoop",
                        "Lanes of a native model that go from batch to batch without leaving native code.")
      .def(nb::init<Store&, HedgeModel&, std::vector<std::vector<uint8_t>>, uint32_t, bool, bool>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("store"), nb::arg("model"), nb::arg("tables"),
           nb::arg("lanes"), nb::arg("sync"), nb::arg("in_steps"))
      .def("run", &run, nb::arg("lane"), nb::arg("groups"), nb::arg("dense"), nb::arg("label"), nb::arg("value"),
           nb::arg("weight"), nb::arg("times_ms"), nb::arg("ends"), nb::arg("ranges"), nb::arg("range_ends"),
           nb::arg("learn_dense"), nb::arg("keep"), nb::arg("predictions"), nb::arg("moments").none() = nb::none(),
           "(how it ended, batches trained, pushed, skipped, bucket, seconds of each stage).")
      .def("join", &join, nb::arg("lane"), "Make the others' steps without batches.")
      .def("kept", &kept, nb::arg("lane"), "Copies of the batches of the last run that were to be kept.")
      .def("abort", &HedgeLoop::abort, "End every lane that waits, or will.")
      .def_prop_ro("dense_steps", &HedgeLoop::dense_steps, "Dense steps made so far; between two runs.");
}

}  // namespace freshet
