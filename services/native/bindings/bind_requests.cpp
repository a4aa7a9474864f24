// Requests: what is served, decoded with what its candidates share kept once.
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/feature_requests.hpp"

namespace freshet {
namespace {

nb::tuple decode(const RequestPlan& plan, const Program& program, const In<std::uint8_t>& data, const In<std::int64_t>& ends,
                 const In<std::uint32_t>& counts) {
  DecodedRequests made;
  {
    nb::gil_scoped_release release;
    made = decode_requests(plan, program, view(data), view(ends), view(counts));
  }
  nb::list groups, list_ends;
  for (auto& g : made.groups)
    groups.append(nb::make_tuple(to_numpy(std::move(g.keys)), to_numpy(std::move(g.feature_starts)), nb::cast(g.lists)));
  for (auto& e : made.list_ends) list_ends.append(to_numpy(std::move(e)));
  std::vector<std::int64_t> bad;
  for (const auto& b : made.bad)
    bad.insert(bad.end(), {b.index, b.program, static_cast<std::int64_t>(b.failure.why), b.failure.node, b.failure.offset});
  return nb::make_tuple(made.size, groups, list_ends, to_numpy(std::move(made.dense)), to_matrix(std::move(bad), 5));
}

}  // namespace

void bind_requests(nb::module_& m) {
  nb::class_<RequestPlan>(m, "RequestPlan")
      .def("__init__",
           [](RequestPlan* self, const DecodePlan& decode, bool explode, bool time_in_element, std::vector<std::uint8_t> columns,
              std::vector<std::uint8_t> lists, std::vector<std::uint8_t> dense, std::vector<std::uint8_t> parts) {
             RequestPlan plan{decode,           explode,          time_in_element, std::move(columns),
                              std::move(lists), std::move(dense), std::move(parts)};
             plan.check();
             new (self) RequestPlan(std::move(plan));
           })
      .def("check", nb::overload_cast<const Program&>(&RequestPlan::check, nb::const_),
           "Raises ValueError if a sink of the program does not fit.");
  m.def("decode_requests", &decode);
}

}  // namespace freshet
