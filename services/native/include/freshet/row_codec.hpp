// Values of rows on a wire, in fewer bits: bf16, fp16, int8 with a scale a row. Rounded to nearest, ties to even; NaN
// stays NaN. The oracle is in numpy, in tests/unit/wire.
#pragma once

#include <cstddef>
#include <cstdint>

namespace freshet {

void pack_bf16(const float* values, size_t n, uint16_t* out);
void unpack_bf16(const uint16_t* packed, size_t n, float* out);
void pack_fp16(const float* values, size_t n, uint16_t* out);
void unpack_fp16(const uint16_t* packed, size_t n, float* out);
// (rows, width); a row's scale is its largest magnitude / 127. A row that is not finite has the scale NaN; one too
// small for a scale is zeros.
void pack_int8(const float* values, size_t rows, size_t width, int8_t* out, float* scales);
void unpack_int8(const int8_t* packed, size_t rows, size_t width, const float* scales, float* out);

}  // namespace freshet
