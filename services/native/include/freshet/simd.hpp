// What hot loops share: function multi-versions, prefetch, tag matching, bf16, and sums whose order is fixed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// FRESHET_CLONES before a function compiles it for each instruction set; the best one is chosen at load. The helpers it
// calls must be FRESHET_INLINE, else they stay plain. Sanitizers crash in the resolvers, which run before they are set
// up.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define FRESHET_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FRESHET_CLONES
#endif
#define FRESHET_INLINE inline __attribute__((always_inline))

namespace freshet {

FRESHET_INLINE void prefetch_read(const void* p) { __builtin_prefetch(p, 0); }
FRESHET_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }
// Into the second-level cache, which can wait for more lines at a time than the first (rows of 84 bytes at random
// places, one thread of a Zen 4: 14 ns each, 24 with prefetch_read).
FRESHET_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// A pause of 10 to 40 ns between two reads of a value that another core will change.
FRESHET_INLINE void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Bit i is set if tags[i] == tag, i < 16; 16 bytes are read.
FRESHET_INLINE uint32_t match16(const uint8_t* tags, uint8_t tag) {
#if defined(__SSE2__)
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_set1_epi8(static_cast<char>(tag)))));
#else
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 16; i++) bits |= static_cast<uint32_t>(tags[i] == tag) << i;
  return bits;
#endif
}

// Upper half of the 128-bit product: maps a 64-bit hash onto [0, n) without a division.
FRESHET_INLINE uint64_t high_product(uint64_t a, uint64_t n) {
  __extension__ using u128 = unsigned __int128;
  return static_cast<uint64_t>((static_cast<u128>(a) * n) >> 64);
}

using f32x16 = float __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));
using f32x4 = float __attribute__((vector_size(16)));

// Sum of squares in one order on every machine: lane j adds floats j, j + 16, ...; then lanes are halved 8, 4, 2, 1.
FRESHET_INLINE float squared_sum(const float* x, uint32_t n) {
  f32x16 lane = {};
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    f32x16 v;
    std::memcpy(&v, x + i, sizeof v);
    lane += v * v;
  }
  if (i < n) {
    float rest[16] = {};
    for (uint32_t j = 0; i + j < n; j++) rest[j] = x[i + j];
    f32x16 v;
    std::memcpy(&v, rest, sizeof v);
    lane += v * v;
  }
  const f32x8 eight = __builtin_shufflevector(lane, lane, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(lane, lane, 8, 9, 10, 11, 12, 13, 14, 15);
  const f32x4 four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Copy 4-byte words; the sizes of rows are too small for a call of memcpy.
FRESHET_INLINE void copy_words(void* to, const void* from, uint32_t words) {
  uint8_t* out = static_cast<uint8_t*>(to);
  const uint8_t* in = static_cast<const uint8_t*>(from);
  for (; words >= 16; words -= 16, out += 64, in += 64) std::memcpy(out, in, 64);
  for (; words >= 4; words -= 4, out += 16, in += 16) std::memcpy(out, in, 16);
  for (; words; words--, out += 4, in += 4) std::memcpy(out, in, 4);
}

FRESHET_INLINE float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest, ties to even. `x` is finite.
FRESHET_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Round up with the probability of the truncated part; `noise` is uniform in 32 bits. `x` is finite.
FRESHET_INLINE uint16_t float_to_bf16_stochastic(float x, uint32_t noise) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + (noise & 0xffffu)) >> 16);
}

}  // namespace freshet
