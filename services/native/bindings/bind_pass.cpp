#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "freshet/pass.hpp"

namespace freshet {

namespace {

void expect(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

// groups: (keys, feature starts, list ends or None of each feature) of each store group.
void run(Pass& pass, const std::vector<nb::tuple>& groups, In2<float> dense, In<u8> label, In<float> value, In<float> weight,
         In<i64> times_ms, In<i64> ends, Out2<float> predictions) {
  PassSamples samples;
  const size_t n = label.size();
  samples.size = static_cast<i64>(n);
  expect(value.size() == n && weight.size() == n && times_ms.size() == n, "label, value, weight and times differ in length");
  expect(dense.shape(0) == n && dense.shape(1) == pass.dense(), "dense must be (samples, dense columns)");
  expect(predictions.shape(0) == n && predictions.shape(1) == pass.labels(), "predictions must be (samples, labels)");
  samples.dense = dense.data();
  samples.label = label.data();
  samples.value = value.data();
  samples.weight = weight.data();
  samples.times_ms = times_ms.data();
  std::vector<In<u32>> held;  // keeps the arrays while native code reads them
  std::vector<In<u64>> held_keys;
  for (const nb::tuple& from : groups) {
    PassGroup group;
    held_keys.push_back(nb::cast<In<u64>>(from[0]));
    held.push_back(nb::cast<In<u32>>(from[1]));
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
      held.push_back(nb::cast<In<u32>>(list));
      expect(held.back().size() == n, "a list end a sample");
      group.ends.push_back(held.back().data());
    }
    samples.groups.push_back(std::move(group));
  }
  const nb::gil_scoped_release release;
  pass.run(samples, ends.data(), ends.size(), predictions.data());
}

}  // namespace

void bind_pass(nb::module_& m) {
  nb::class_<Pass>(m, "Pass", "Trains batch after batch on one thread, without leaving native code between two of them.")
      .def(nb::init<Store&, HedgeModel&, std::vector<std::vector<u8>>>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::arg("store"), nb::arg("model"), nb::arg("tables"))
      .def("run", &run, nb::arg("groups"), nb::arg("dense"), nb::arg("label"), nb::arg("value"), nb::arg("weight"),
           nb::arg("times_ms"), nb::arg("ends"), nb::arg("predictions"));
}

}  // namespace freshet
