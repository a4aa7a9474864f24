#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "freshet/columns.hpp"

namespace freshet {

namespace {

// (type, index of null or -1, valid or None, list ends or None, integers, reals, truths or text, text ends)
using Leaf = std::tuple<int, int, std::optional<In<std::uint8_t>>, std::optional<In<std::int64_t>>,
                        std::optional<In<std::int64_t>>, std::optional<In<double>>, std::optional<In<std::uint8_t>>,
                        std::optional<In<std::int64_t>>>;

ColumnIn column_of(std::size_t n, const Leaf& leaf) {
  const auto& [type, null_branch, valid, list_ends, integers, reals, bytes, text_ends] = leaf;
  ColumnIn c;
  if (type < 0 || type > static_cast<int>(ColumnType::text)) throw nb::value_error("no such column type");
  c.type = static_cast<ColumnType>(type);
  c.null_branch = null_branch;
  c.list = list_ends.has_value();
  if ((valid && valid->size() != n) || (list_ends && list_ends->size() != n))
    throw nb::value_error("masks and list ends must be as long as there are records");
  c.valid = valid ? valid->data() : nullptr;
  c.list_ends = list_ends ? list_ends->data() : nullptr;
  const bool text = c.type == ColumnType::text, real = c.type == ColumnType::real || c.type == ColumnType::real32;
  if (text ? !(bytes && text_ends) : real ? !reals : c.type == ColumnType::truth ? !bytes : !integers)
    throw nb::value_error("a column's values are missing");
  if (integers) c.integers = integers->data();
  if (reals) c.reals = reals->data();
  if (text) {
    c.text = bytes->data();
    c.text_bytes = bytes->size();
    c.text_ends = text_ends->data();
  } else if (bytes) {
    c.truths = bytes->data();
  }
  c.values = text ? text_ends->size() : real ? reals->size() : c.type == ColumnType::truth ? bytes->size() : integers->size();
  return c;
}

template <class T>
nb::object own(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

nb::tuple encode(std::size_t n, const std::vector<Leaf>& leaves) {
  std::vector<ColumnIn> columns;
  for (const Leaf& leaf : leaves) columns.push_back(column_of(n, leaf));
  EncodedColumns made;
  {
    const nb::gil_scoped_release release;
    made = encode_columns(n, columns);
  }
  return nb::make_tuple(own(std::move(made.data)), own(std::move(made.ends)));
}

}  // namespace

void bind_columns(nb::module_& m) { m.def("encode_columns", &encode, nb::arg("n"), nb::arg("leaves")); }

}  // namespace freshet
