#include "freshet/row_codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "freshet/simd.hpp"

namespace freshet {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinite = 0x7f800000u;
constexpr uint32_t kWide = 0x7e800000u;  // 2^126: from here on the span of a row may be no number
constexpr uint16_t kNanHead = 0x7fc0u;
constexpr float kSmallestScale = std::numeric_limits<float>::min();  // below it a scale has no inverse
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: added to a small number it leaves the nearest integer, ties to
                                         // even, in the lower bits of the sum

FRESHET_INLINE uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
FRESHET_INLINE float of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
FRESHET_INLINE float of_head(uint16_t head) { return of_bits(static_cast<uint32_t>(head) << 16); }

// bf16 at or below x, a number below 2^126 in magnitude.
FRESHET_INLINE uint16_t head_below(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits >> 16) + ((bits >> 31) & ((bits & 0xffffu) != 0)));
}

// bf16 at or above x, which is at least 0 and below 2^127.
FRESHET_INLINE uint16_t head_above(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits >> 16) + ((bits & 0xffffu) != 0));
}

constexpr size_t kScaleBytes = 2, kRangeBytes = 4;  // heads: a scale; low and step

FRESHET_INLINE size_t codes_bytes(size_t width, int bits) { return bits == 8 ? width : (width + 1) / 2; }

// The vectors of rows: `width` floats each, `stride` floats apart, `packed` bytes apart when encoded.
struct Rows {
  size_t rows, width, stride, packed;
};

// Functions over all rows, for one instruction set.
struct Codecs {
  void (*pack)(const float*, const Rows&, const RowFormat&, uint64_t, uint8_t*);
  void (*unpack)(const uint8_t*, const Rows&, const RowFormat&, float*);
};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only
#endif

namespace plain {
constexpr size_t kLanes = 4;  // floats of a register
#include "row_codec_kernel.inc"
}  // namespace plain

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace v3 {
constexpr size_t kLanes = 8;
#include "row_codec_kernel.inc"
}  // namespace v3
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace v4 {
constexpr size_t kLanes = 16;
#include "row_codec_kernel.inc"
}  // namespace v4
#pragma GCC pop_options
#endif

const Codecs& best() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return v4::kCodecs;
  if (__builtin_cpu_supports("x86-64-v3")) return v3::kCodecs;
#endif
  return plain::kCodecs;
}

const Codecs& codecs() {
  static const Codecs& chosen = best();
  return chosen;
}

FRESHET_INLINE uint16_t nearest_half(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
  return static_cast<uint16_t>((bits & kMagnitude) > kInfinite ? quiet : rounded);
}

}  // namespace

FRESHET_CLONES
void pack_bf16(const float* values, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i++) out[i] = nearest_half(bits_of(values[i]));
}

FRESHET_CLONES
void unpack_bf16(const uint16_t* packed, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = std::bit_cast<float>(static_cast<uint32_t>(packed[i]) << 16);
}

FRESHET_CLONES
void pack_fp16(const float* values, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i++) out[i] = std::bit_cast<uint16_t>(static_cast<_Float16>(values[i]));
}

FRESHET_CLONES
void unpack_fp16(const uint16_t* packed, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = static_cast<float>(std::bit_cast<_Float16>(packed[i]));
}

size_t packed_bytes(const RowFormat& format) {
  if (format.bits != 8 && format.bits != 4) throw std::invalid_argument("integers of rows have 8 or 4 bits");
  return 2 * format.scalars + (format.asymmetric ? kRangeBytes : kScaleBytes) + codes_bytes(format.vector, format.bits);
}

void pack_rows(const float* values, size_t rows, const RowFormat& format, uint64_t seed, uint8_t* out) {
  const size_t scalars = format.scalars, stride = scalars + format.vector, packed = packed_bytes(format);
  for (size_t r = 0; scalars && r < rows; r++) {
    for (size_t i = 0; i < scalars; i++) {
      const uint16_t half = nearest_half(bits_of(values[r * stride + i]));
      std::memcpy(out + r * packed + 2 * i, &half, sizeof half);
    }
  }
  codecs().pack(values + scalars, {rows, format.vector, stride, packed}, format, seed, out + 2 * scalars);
}

void unpack_rows(const uint8_t* packed, size_t rows, const RowFormat& format, float* out) {
  const size_t scalars = format.scalars, stride = scalars + format.vector, bytes = packed_bytes(format);
  for (size_t r = 0; scalars && r < rows; r++) {
    for (size_t i = 0; i < scalars; i++) {
      uint16_t half;
      std::memcpy(&half, packed + r * bytes + 2 * i, sizeof half);
      out[r * stride + i] = of_head(half);
    }
  }
  codecs().unpack(packed + 2 * scalars, {rows, format.vector, stride, bytes}, format, out + scalars);
}

}  // namespace freshet
