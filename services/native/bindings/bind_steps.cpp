#include "bindings.hpp"
#include "freshet/row_steps.hpp"
#include "slots.hpp"

namespace freshet {

namespace {

void expect(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

void make(RowSteps* self, const std::vector<SlotTuple>& slots) { new (self) RowSteps(slots_of(slots)); }

// Buckets of which keys are sorted: starts rise from 0 to the number of keys, so that no index leaves the arrays.
Keys keys_of(const In<uint64_t>& keys, const In<uint8_t>& tables, const In<uint32_t>& starts) {
  expect(tables.size() == keys.size(), "tables must be as long as keys");
  expect(starts.size() > 1 && starts.data()[0] == 0 && starts.data()[starts.size() - 1] == keys.size(),
         "bucket_starts must rise from 0 to the number of keys");
  for (size_t b = 1; b < starts.size(); b++)
    expect(starts.data()[b - 1] <= starts.data()[b], "bucket_starts must rise from 0 to the number of keys");
  return {keys.data(), tables.data(), keys.size(), starts.data()};
}

size_t step(const RowSteps& steps, In<uint64_t> keys, In<uint8_t> tables, In<uint32_t> starts, Out2<float> values,
            Out2<float> states, In<uint64_t> their_keys, In<uint8_t> their_tables, In<uint32_t> their_starts,
            In2<float> gradients) {
  const Keys mine = keys_of(keys, tables, starts), theirs = keys_of(their_keys, their_tables, their_starts);
  const RowLayout& layout = steps.layout();
  expect(starts.size() == their_starts.size(), "both must be sorted by the same buckets");
  expect(values.shape(0) == keys.size() && values.shape(1) == layout.width(), "values must be (keys, floats of a row)");
  expect(states.shape(0) == keys.size() && states.shape(1) == layout.state_floats(),
         "states must be (keys, floats of a row's optimiser state)");
  expect(gradients.shape(0) == their_keys.size() && gradients.shape(1) == layout.width(),
         "gradients must be (their keys, floats of a row)");
  const nb::gil_scoped_release release;
  return steps.step(mine, values.data(), states.data(), theirs, gradients.data(),
                    static_cast<uint32_t>(starts.size() - 1));
}

}  // namespace

void bind_steps(nb::module_& m) {
  nb::class_<RowSteps>(m, "RowSteps")
      .def("__init__", &make, nb::arg("slots"))
      .def("step", &step, nb::arg("keys"), nb::arg("tables"), nb::arg("bucket_starts"), nb::arg("values").noconvert(),
           nb::arg("states").noconvert(), nb::arg("their_keys"), nb::arg("their_tables"),
           nb::arg("their_bucket_starts"), nb::arg("gradients"))
      .def_prop_ro("state_floats", [](const RowSteps& s) { return s.layout().state_floats(); });
}

}  // namespace freshet
