#include <array>

#include "freshet/block.hpp"
#include "freshet/hash.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace freshet {
namespace {

using Table = std::array<std::array<uint32_t, 256>, 8>;

// Table k gives the remainder of a byte followed by k zero bytes: eight bytes are taken at a time.
constexpr Table make_tables() {
  Table t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) ? (c >> 1) ^ 0xEDB88320u : c >> 1;
    t[0][i] = c;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
  }
  return t;
}
constexpr Table kTables = make_tables();

// Takes and gives the register as it is inside (inverted).
uint32_t by_tables(const uint8_t* p, size_t n, uint32_t crc) {
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t v = read_u64(p) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(v >> (8 * k)) & 0xFF];
  }
  for (; n; ++p, --n) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009), bit-reflected.
// Four lanes of 16 bytes are folded forward by 64 bytes, then into one; the last 16 bytes go through the tables.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i x, __m128i k, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t by_multiplication(const uint8_t* p, size_t n, uint32_t crc) {
  const auto load = [](const uint8_t* at) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  };
  const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);  // x^(512-32), x^(512+32) mod P
  const __m128i by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);  // x^(128-32), x^(128+32) mod P
  __m128i lane[4];
  for (int i = 0; i < 4; ++i) lane[i] = load(p + 16 * i);
  lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
    for (int i = 0; i < 4; ++i) lane[i] = fold(lane[i], by64, load(p + 16 * i));
  }
  __m128i x = lane[0];
  for (int i = 1; i < 4; ++i) x = fold(x, by16, lane[i]);
  for (; n >= 16; p += 16, n -= 16) x = fold(x, by16, load(p));
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), x);
  return by_tables(p, n, by_tables(rest, sizeof rest, 0));
}

#endif

}  // namespace

uint32_t block_crc32(const uint8_t* data, size_t size, uint32_t crc) {
#if defined(__x86_64__)
  static const bool multiplies = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (multiplies && size >= 64) return ~by_multiplication(data, size, ~crc);
#endif
  return ~by_tables(data, size, ~crc);
}

}  // namespace freshet
