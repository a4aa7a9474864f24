// Values of rows on a wire, in fewer bits. NaN stays NaN. The oracles are in numpy, in
// tests/unit/wires/test_codecs.py; the layouts in schemas/README.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace freshet {

// bf16 and fp16, rounded to nearest, ties to even.
void pack_bf16(const float* values, size_t n, uint16_t* out);
void unpack_bf16(const uint16_t* packed, size_t n, float* out);
void pack_fp16(const float* values, size_t n, uint16_t* out);
void unpack_fp16(const uint16_t* packed, size_t n, float* out);

// A row in integers: `scalars` floats as bf16, then a vector in codes behind a head of its own, as the scalars' sizes
// differ from the vector's. Heads are bf16, which have the exponents of float32: no vector vanishes. Codes of 4 bits
// share a byte in pairs, the first in its lower half.
//
// Symmetric, for gradients and for rows of 8 bits: code * scale, codes from -127 to 127 or from -7 to 7, zero exactly.
// The head is the scale, the vector's largest magnitude / 127 or 7, rounded up: NaN if the vector is not finite, 0 if
// it is too small for a scale. Codes are nearest, ties to even; with a `seed` other than 0 rounded up with a
// probability of their fraction, so that their expectation is the value (QSGD, Alistarh et al., 1610.02132).
//
// Asymmetric, for rows of 4 bits: low + code * step, codes from 0 to 255 or 15, nearest. The head is low rounded down
// and step rounded up. The step is NaN if the vector is not finite, or has a magnitude of 2^126 or more.
struct RowFormat {
  int bits;  // 8 or 4
  bool asymmetric;
  size_t scalars, vector;  // floats
};

size_t packed_bytes(const RowFormat& format);
void pack_rows(const float* values, size_t rows, const RowFormat& format, uint64_t seed, uint8_t* out);
void unpack_rows(const uint8_t* packed, size_t rows, const RowFormat& format, float* out);

}  // namespace freshet
