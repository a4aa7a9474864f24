// Runs of packed rows, apart from any table: merged and checked.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arrays.hpp"
#include "runs_view.hpp"

namespace freshet {
namespace {

using RunsTuple = std::tuple<In<uint8_t>, In<uint8_t>, uint64_t>;  // directory, body, start

// (directory, body, faulty source, its fault).
nb::tuple merge(const std::vector<RunsTuple>& newest_first, const In<uint32_t>& widths, bool keep_removed,
                uint64_t most_bytes) {
  std::vector<RunsView> sources;
  for (const auto& [directory, body, start] : newest_first) sources.push_back(runs_view(directory, body, start));
  const RecordWidths bytes = widths_of(widths);
  RunColumns merged;
  std::string why;
  size_t failed = 0;
  {
    const nb::gil_scoped_release release;
    why = merge_runs(sources, bytes, keep_removed, most_bytes, merged, failed);
  }
  if (!why.empty()) merged = {};
  auto [directory, body] = arrays_of(std::move(merged));
  return nb::make_tuple(directory, body, failed, why);
}

// (directory, body) of the rows of chosen keys, sorted by (bucket, table, key).
nb::tuple pick(const In<uint8_t>& directory, const In<uint8_t>& body, uint64_t start, const In<uint32_t>& widths,
               const In<int64_t>& buckets, const In<uint8_t>& tables, const In<uint64_t>& keys) {
  const RunsView runs = runs_view(directory, body, start);
  const RecordWidths bytes = widths_of(widths);
  if (const std::string why = runs_fault(runs, bytes); !why.empty()) throw nb::value_error(why.c_str());
  if (buckets.size() != keys.size() || tables.size() != keys.size())
    throw nb::value_error("a bucket and a table for each key");
  RunColumns picked;
  {
    const nb::gil_scoped_release release;
    pick_runs(runs, bytes, view(buckets), view(tables), view(keys), picked);
  }
  auto [chosen, rows] = arrays_of(std::move(picked));
  return nb::make_tuple(chosen, rows);
}

std::string fault(const In<uint8_t>& directory, const In<uint8_t>& body, uint64_t start, const In<uint32_t>& widths) {
  return runs_fault(runs_view(directory, body, start), widths_of(widths));
}

}  // namespace

void bind_runs(nb::module_& m) {
  m.def("merge_runs", &merge, nb::arg("newest_first"), nb::arg("widths"), nb::arg("keep_removed"),
        nb::arg("most_bytes"));
  m.def("pick_runs", &pick, nb::arg("directory"), nb::arg("body"), nb::arg("start"), nb::arg("widths"),
        nb::arg("buckets"), nb::arg("tables"), nb::arg("keys"));
  m.def("runs_fault", &fault, nb::arg("directory"), nb::arg("body"), nb::arg("start"), nb::arg("widths"));
}

}  // namespace freshet
