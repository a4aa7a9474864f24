// Pages of Redis hashes: arguments that write runs, and runs of answers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/redis_pages.hpp"
#include "runs_view.hpp"

namespace freshet {
namespace {

// (arguments, ends of pages, pages of each bucket, the fault).
nb::tuple writes(const In<uint8_t>& directory, const In<uint8_t>& body, uint64_t start, const In<uint32_t>& widths,
                 const In<int64_t>& buckets, const In<int64_t>& seqs, bool whole, uint32_t page_bytes) {
  const RunsView runs = runs_view(directory, body, start);
  const RecordWidths bytes = widths_of(widths);
  PageWrites out;
  std::string why;
  {
    const nb::gil_scoped_release release;
    why = page_writes(runs, bytes, view(buckets), view(seqs), whole, page_bytes, out);
  }
  return nb::make_tuple(array(std::move(out.arguments)), to_numpy(std::move(out.ends)), to_numpy(std::move(out.pages)),
                        why);
}

// (directory, body, faulty bucket, its fault). Items are `bytes`, which live as long as the lists
// do.
nb::tuple runs_of(const std::vector<std::tuple<uint32_t, nb::list>>& buckets, const In<uint32_t>& widths,
                  uint64_t most_bytes) {
  std::vector<std::vector<std::span<const uint8_t>>> items(buckets.size());
  std::vector<PagesOfBucket> pages;
  for (size_t b = 0; b < buckets.size(); b++) {
    const auto& [bucket, list] = buckets[b];
    items[b].reserve(nb::len(list));
    for (nb::handle item : list) {
      if (!PyBytes_Check(item.ptr())) throw nb::type_error("fields and values of a hash must be bytes");
      items[b].push_back({reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(item.ptr())),
                          static_cast<size_t>(PyBytes_GET_SIZE(item.ptr()))});
    }
    pages.push_back({bucket, items[b]});
  }
  const RecordWidths bytes = widths_of(widths);
  RunColumns runs;
  std::string why;
  size_t failed = 0;
  {
    const nb::gil_scoped_release release;
    why = runs_of_pages(pages, bytes, most_bytes, runs, failed);
  }
  if (!why.empty()) runs = {};
  auto [directory, body] = arrays_of(std::move(runs));
  return nb::make_tuple(directory, body, failed, why);
}

}  // namespace

void bind_redis(nb::module_& m) {
  m.def("page_writes", &writes, nb::arg("directory"), nb::arg("body"), nb::arg("start"), nb::arg("widths"),
        nb::arg("buckets"), nb::arg("seqs"), nb::arg("whole"), nb::arg("page_bytes"));
  m.def("runs_of_pages", &runs_of, nb::arg("buckets"), nb::arg("widths"), nb::arg("most_bytes"));
}

}  // namespace freshet
