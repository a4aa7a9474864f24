// Rows of Redis hashes: commands that write runs, and runs of what was answered.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/redis_hash.hpp"
#include "runs_view.hpp"

namespace freshet {
namespace {

// (HSET commands, their ends, how many, removed fields, their ends, how many, what is wrong), a bucket each.
nb::tuple writes(const In<u8>& directory, const In<u8>& body, u64 start, const In<u32>& widths, const In<i64>& buckets,
                 const In<u8>& keys, const In<i64>& key_ends, u32 rows_per_command) {
  const RunsView runs = runs_view(directory, body, start);
  const RecordWidths bytes = widths_of(widths);
  HashWrites out;
  std::string why;
  {
    const nb::gil_scoped_release release;
    why = hash_writes(runs, bytes, view(buckets), {view(keys), view(key_ends)}, rows_per_command, out);
  }
  return nb::make_tuple(array(std::move(out.sets)), to_numpy(std::move(out.set_ends)), to_numpy(std::move(out.set_commands)),
                        array(std::move(out.removed)), to_numpy(std::move(out.removed_ends)),
                        to_numpy(std::move(out.removed_fields)), why);
}

// (directory, body, hash that is wrong, what is wrong with it). Items are `bytes`, which live as long as the lists do.
nb::tuple runs_of(const std::vector<std::tuple<u32, nb::list>>& hashes, const In<u32>& widths, u64 most_bytes) {
  std::vector<std::vector<std::span<const u8>>> items(hashes.size());
  std::vector<HashRows> rows;
  for (size_t h = 0; h < hashes.size(); h++) {
    const auto& [bucket, list] = hashes[h];
    items[h].reserve(nb::len(list));
    for (nb::handle item : list) {
      if (!PyBytes_Check(item.ptr())) throw nb::type_error("fields and values of a hash must be bytes");
      items[h].push_back({reinterpret_cast<const u8*>(PyBytes_AS_STRING(item.ptr())), static_cast<size_t>(PyBytes_GET_SIZE(item.ptr()))});
    }
    rows.push_back({bucket, items[h]});
  }
  const RecordWidths bytes = widths_of(widths);
  RunColumns runs;
  std::string why;
  size_t failed = 0;
  {
    const nb::gil_scoped_release release;
    why = runs_of_hashes(rows, bytes, most_bytes, runs, failed);
  }
  if (!why.empty()) runs = {};
  auto [directory, body] = arrays_of(std::move(runs));
  return nb::make_tuple(directory, body, failed, why);
}

}  // namespace

void bind_redis(nb::module_& m) {
  m.def("hash_writes", &writes, nb::arg("directory"), nb::arg("body"), nb::arg("start"), nb::arg("widths"), nb::arg("buckets"),
        nb::arg("keys"), nb::arg("key_ends"), nb::arg("rows_per_command"));
  m.def("runs_of_hashes", &runs_of, nb::arg("hashes"), nb::arg("widths"), nb::arg("most_bytes"));
}

}  // namespace freshet
