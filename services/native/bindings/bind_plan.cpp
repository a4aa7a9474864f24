#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "freshet/plan.hpp"

namespace freshet {

namespace {

template <typename T>
using View = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

// A view that keeps its memory alive even if the plan moves on to a larger one.
template <typename T>
View<T> view(const Buffer<T>& buffer, size_t n) {
  auto* owner = new std::shared_ptr<T[]>(buffer.shared());
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<T[]>*>(p); });
  return View<T>(buffer.data(), {n}, capsule);
}

void run(Plan& plan, In<uint64_t> keys, In<uint32_t> feature_starts, In<uint8_t> feature_tables) {
  if (feature_starts.size() != feature_tables.size() + 1)
    throw nb::value_error("feature_starts must hold one more than feature_tables");
  const nb::gil_scoped_release release;
  plan.run(keys.data(), keys.size(), feature_starts.data(), feature_tables.data(), feature_tables.size());
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<uint32_t>(), nb::arg("buckets"))
      .def("run", &run, nb::arg("keys"), nb::arg("feature_starts"), nb::arg("feature_tables"))
      .def_prop_ro("unique", &Plan::unique)
      .def_prop_ro(
          "keys", [](const Plan& p) { return view(p.keys, p.unique()); }, nb::rv_policy::reference)
      .def_prop_ro(
          "tables", [](const Plan& p) { return view(p.tables, p.unique()); }, nb::rv_policy::reference)
      .def_prop_ro(
          "positions", [](const Plan& p) { return view(p.positions, p.occurrences()); }, nb::rv_policy::reference)
      .def_prop_ro(
          "bucket_starts", [](const Plan& p) { return view(p.bucket_starts, p.buckets() + 1); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "order", [](const Plan& p) { return view(p.order, p.present()); }, nb::rv_policy::reference)
      .def_prop_ro(
          "order_starts", [](const Plan& p) { return view(p.order_starts, p.unique() + 1); }, nb::rv_policy::reference);
}

}  // namespace freshet
