#include "freshet/row_codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "freshet/feature_clones.hpp"

namespace freshet {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;

constexpr u32 magnitude = 0x7fffffffu, infinite = 0x7f800000u;
constexpr float smallest_scale = std::numeric_limits<float>::min();  // below it a scale has no inverse
constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction, to nearest, ties to even

u32 bits_of(float x) { return std::bit_cast<u32>(x); }

// The largest scale that 127 times it is a number.
float largest_scale() { return std::nextafter(std::numeric_limits<float>::max() / 127.0f, 0.0f); }

}  // namespace

FRESHET_FEATURE_CLONES
void pack_bf16(const float* values, std::size_t n, u16* out) {
  for (std::size_t i = 0; i < n; i++) {
    const u32 bits = bits_of(values[i]);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32 quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
    out[i] = static_cast<u16>((bits & magnitude) > infinite ? quiet : rounded);
  }
}

FRESHET_FEATURE_CLONES
void unpack_bf16(const u16* packed, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; i++) out[i] = std::bit_cast<float>(static_cast<u32>(packed[i]) << 16);
}

FRESHET_FEATURE_CLONES
void pack_fp16(const float* values, std::size_t n, u16* out) {
  for (std::size_t i = 0; i < n; i++) out[i] = std::bit_cast<u16>(static_cast<_Float16>(values[i]));
}

FRESHET_FEATURE_CLONES
void unpack_fp16(const u16* packed, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; i++) out[i] = static_cast<float>(std::bit_cast<_Float16>(packed[i]));
}

FRESHET_FEATURE_CLONES
void pack_int8(const float* values, std::size_t rows, std::size_t width, std::int8_t* out, float* scales) {
  const float most = largest_scale();
  for (std::size_t r = 0; r < rows; r++, values += width, out += width) {
    u32 largest = 0;
    for (std::size_t i = 0; i < width; i++) largest = std::max(largest, bits_of(values[i]) & magnitude);
    float scale = std::min(std::bit_cast<float>(largest) / 127.0f, most);
    if (scale < smallest_scale) scale = 0.0f;
    if (largest >= infinite || scale == 0.0f) {
      scales[r] = largest >= infinite ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      std::memset(out, 0, width);
      continue;
    }
    scales[r] = scale;
    const float factor = 1.0f / scale;
    for (std::size_t i = 0; i < width; i++) {
      const float x = std::min(std::max(values[i] * factor, -127.0f), 127.0f);
      out[i] = static_cast<std::int8_t>(static_cast<int>((x + rounder) - rounder));
    }
  }
}

FRESHET_FEATURE_CLONES
void unpack_int8(const std::int8_t* packed, std::size_t rows, std::size_t width, const float* scales, float* out) {
  for (std::size_t r = 0; r < rows; r++, packed += width, out += width)
    for (std::size_t i = 0; i < width; i++) out[i] = static_cast<float>(packed[i]) * scales[r];
}

}  // namespace freshet
