// Runs of packed rows between numpy and the core, without a copy.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "bindings.hpp"
#include "freshet/runs.hpp"

namespace freshet {

// A numpy array of a vector's or column's memory, which it takes over.
template <template <typename...> typename Columns, typename T>
nb::object array(Columns<T>&& values, std::initializer_list<size_t> shape) {
  auto* owner = new Columns<T>(std::move(values));
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<Columns<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::c_contig>(owner->data(), shape.size(), shape.begin(), capsule));
}
template <template <typename...> typename Columns, typename T>
nb::object array(Columns<T>&& values) {
  const size_t n = values.size();
  return array(std::move(values), {n});
}

// A directory comes as the bytes of its entries.
inline RunsView runs_view(const In<uint8_t>& directory, const In<uint8_t>& body, uint64_t start) {
  if (directory.size() % sizeof(RunEntry) != 0) throw nb::value_error("a directory holds entries of 32 bytes");
  return {{reinterpret_cast<const RunEntry*>(directory.data()), directory.size() / sizeof(RunEntry)},
          {body.data(), body.size()},
          start};
}

inline RecordWidths widths_of(const In<uint32_t>& widths) {
  RecordWidths out;
  if (widths.size() != out.size()) throw nb::value_error("widths must hold one for each of 256 table ids");
  std::copy_n(widths.data(), out.size(), out.begin());
  return out;
}

// Directory, as bytes, and body.
inline std::pair<nb::object, nb::object> arrays_of(RunColumns&& runs) {
  const size_t n = runs.directory.size();
  auto* owner = new Column<RunEntry>(std::move(runs.directory));
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<Column<RunEntry>*>(p); });
  auto* bytes = reinterpret_cast<uint8_t*>(owner->data());
  const size_t size = n * sizeof(RunEntry);
  nb::object directory = nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::c_contig>(bytes, {size}, capsule));
  return {directory, array(std::move(runs.body))};
}

}  // namespace freshet
