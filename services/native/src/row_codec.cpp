#include "freshet/row_codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "freshet/feature_clones.hpp"

namespace freshet {
namespace {

constexpr uint32_t magnitude = 0x7fffffffu, infinite = 0x7f800000u;
constexpr float smallest_scale = std::numeric_limits<float>::min();  // below it a scale has no inverse
constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction, to nearest, ties to even

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// The largest scale that 127 times it is a number.
float largest_scale() { return std::nextafter(std::numeric_limits<float>::max() / 127.0f, 0.0f); }

}  // namespace

FRESHET_FEATURE_CLONES
void pack_bf16(const float* values, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(values[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
    out[i] = static_cast<uint16_t>((bits & magnitude) > infinite ? quiet : rounded);
  }
}

FRESHET_FEATURE_CLONES
void unpack_bf16(const uint16_t* packed, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = std::bit_cast<float>(static_cast<uint32_t>(packed[i]) << 16);
}

FRESHET_FEATURE_CLONES
void pack_fp16(const float* values, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i++) out[i] = std::bit_cast<uint16_t>(static_cast<_Float16>(values[i]));
}

FRESHET_FEATURE_CLONES
void unpack_fp16(const uint16_t* packed, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = static_cast<float>(std::bit_cast<_Float16>(packed[i]));
}

FRESHET_FEATURE_CLONES
void pack_int8(const float* values, size_t rows, size_t width, int8_t* out, float* scales) {
  const float most = largest_scale();
  for (size_t r = 0; r < rows; r++, values += width, out += width) {
    uint32_t largest = 0;
    for (size_t i = 0; i < width; i++) largest = std::max(largest, bits_of(values[i]) & magnitude);
    float scale = std::min(std::bit_cast<float>(largest) / 127.0f, most);
    if (scale < smallest_scale) scale = 0.0f;
    if (largest >= infinite || scale == 0.0f) {
      scales[r] = largest >= infinite ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      std::memset(out, 0, width);
      continue;
    }
    scales[r] = scale;
    const float factor = 1.0f / scale;
    for (size_t i = 0; i < width; i++) {
      const float x = std::min(std::max(values[i] * factor, -127.0f), 127.0f);
      out[i] = static_cast<int8_t>(static_cast<int>((x + rounder) - rounder));
    }
  }
}

FRESHET_FEATURE_CLONES
void unpack_int8(const int8_t* packed, size_t rows, size_t width, const float* scales, float* out) {
  for (size_t r = 0; r < rows; r++, packed += width, out += width)
    for (size_t i = 0; i < width; i++) out[i] = static_cast<float>(packed[i]) * scales[r];
}

}  // namespace freshet
