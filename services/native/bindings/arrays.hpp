// Handing native memory to numpy without a copy.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/feature_decode.hpp"

namespace freshet {

template <class T>
std::span<const T> view(const In<T>& a) {
  return {a.data(), a.size()};
}

template <class T>
std::span<const T> flat(const In2<T>& a) {
  return {a.data(), a.size()};
}

template <class T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

template <class T>
nb::object to_numpy(HeapArray<T>&& buffer) {
  T* data = buffer.data.release();
  nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {buffer.size}, owner));
}

// Rows of `width` numbers each, as a matrix.
template <class T>
nb::object to_matrix(std::vector<T>&& values, size_t width) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(kept->data(), {kept->size() / width, width}, owner));
}

inline nb::tuple to_numpy(BytesColumn&& column) {
  return nb::make_tuple(to_numpy(std::move(column.data)), to_numpy(std::move(column.ends)));
}

}  // namespace freshet
