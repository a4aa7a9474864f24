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

RowFormat format_of(int bits, bool asymmetric, size_t scalars, size_t width) {
  if (width <= scalars) throw std::invalid_argument("rows without a vector have no integer codec");
  return {bits, asymmetric, scalars, width - scalars};
}

void pack_integers(const In2<float>& values, int bits, bool asymmetric, size_t scalars, uint64_t seed,
                   Out2<uint8_t> out) {
  const RowFormat format = format_of(bits, asymmetric, scalars, values.shape(1));
  expect_equal(out.shape(0), values.shape(0));
  expect_equal(out.shape(1), packed_bytes(format));
  const nb::gil_scoped_release release;
  pack_rows(values.data(), values.shape(0), format, seed, out.data());
}

void unpack_integers(const In2<uint8_t>& packed, int bits, bool asymmetric, size_t scalars, Out2<float> out) {
  const RowFormat format = format_of(bits, asymmetric, scalars, out.shape(1));
  expect_equal(packed.shape(0), out.shape(0));
  expect_equal(packed.shape(1), packed_bytes(format));
  const nb::gil_scoped_release release;
  unpack_rows(packed.data(), out.shape(0), format, out.data());
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.def("pack_bf16", &pack_halves<pack_bf16>, nb::arg("values"), nb::arg("out").noconvert());
  m.def("unpack_bf16", &unpack_halves<unpack_bf16>, nb::arg("packed"), nb::arg("out").noconvert());
  m.def("pack_fp16", &pack_halves<pack_fp16>, nb::arg("values"), nb::arg("out").noconvert());
  m.def("unpack_fp16", &unpack_halves<unpack_fp16>, nb::arg("packed"), nb::arg("out").noconvert());
  m.def("pack_integers", &pack_integers, nb::arg("values"), nb::arg("bits"), nb::arg("asymmetric"), nb::arg("scalars"),
        nb::arg("seed"), nb::arg("out").noconvert());
  m.def("unpack_integers", &unpack_integers, nb::arg("packed"), nb::arg("bits"), nb::arg("asymmetric"),
        nb::arg("scalars"), nb::arg("out").noconvert());
}

}  // namespace freshet
