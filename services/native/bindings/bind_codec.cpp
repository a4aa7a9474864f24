// Values of rows in fewer bits.
#include <stdexcept>

#include "bindings.hpp"
#include "freshet/row_codec.hpp"

namespace freshet {
namespace {

void expect_equal(size_t found, size_t expected) {
  if (found != expected) throw std::invalid_argument("packed and plain values must be of equal shape");
}

template <void (*pack)(const float*, size_t, uint16_t*)>
void pack_halves(const In2<float>& values, Out2<uint16_t> out) {
  expect_equal(out.size(), values.size());
  const nb::gil_scoped_release release;
  pack(values.data(), values.size(), out.data());
}

template <void (*unpack)(const uint16_t*, size_t, float*)>
void unpack_halves(const In2<uint16_t>& packed, Out2<float> out) {
  expect_equal(out.size(), packed.size());
  const nb::gil_scoped_release release;
  unpack(packed.data(), packed.size(), out.data());
}

void pack_bytes(const In2<float>& values, Out2<int8_t> out, Out<float> scales) {
  expect_equal(out.size(), values.size());
  expect_equal(scales.size(), values.shape(0));
  const nb::gil_scoped_release release;
  pack_int8(values.data(), values.shape(0), values.shape(1), out.data(), scales.data());
}

void unpack_bytes(const In2<int8_t>& packed, const In<float>& scales, Out2<float> out) {
  expect_equal(out.size(), packed.size());
  expect_equal(scales.size(), packed.shape(0));
  const nb::gil_scoped_release release;
  unpack_int8(packed.data(), packed.shape(0), packed.shape(1), scales.data(), out.data());
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.def("pack_bf16", &pack_halves<pack_bf16>, nb::arg("values"), nb::arg("out").noconvert());
  m.def("unpack_bf16", &unpack_halves<unpack_bf16>, nb::arg("packed"), nb::arg("out").noconvert());
  m.def("pack_fp16", &pack_halves<pack_fp16>, nb::arg("values"), nb::arg("out").noconvert());
  m.def("unpack_fp16", &unpack_halves<unpack_fp16>, nb::arg("packed"), nb::arg("out").noconvert());
  m.def("pack_int8", &pack_bytes, nb::arg("values"), nb::arg("out").noconvert(), nb::arg("scales").noconvert());
  m.def("unpack_int8", &unpack_bytes, nb::arg("packed"), nb::arg("scales"), nb::arg("out").noconvert());
}

}  // namespace freshet
