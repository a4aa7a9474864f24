// Hashes: XXH3-64 with a seed, the bijective mix of integers, and the 64-bit keys of rows made of them.
//
// Every output here is frozen: rows already learned are found by it. tests/unit/features/vectors.json holds vectors.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace freshet {

static_assert(std::endian::native == std::endian::little, "freshet reads little-endian words in place");

inline uint64_t read_u64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline uint32_t read_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// XXH3 with 64-bit output, written from its specification (doc/xxhash_spec.md of the xxHash project, "XXH3"): any
// length; `data` may be null if size is 0. Strings of ids are short, so up to 16 bytes are hashed in line.
uint64_t xxh3_64_longer(const uint8_t* data, size_t size, uint64_t seed);  // size > 16

namespace xxh3 {

// Words of the default secret, combined as the short lengths use them.
inline constexpr uint64_t kFlip0 = 0x4c263a81e69035e0ull ^ 0xcb00c391bb52283cull;      // bytes 56 and 64
inline constexpr uint32_t kFlip1 = 0x396cfeb8u ^ 0xbe4ba423u;                          // 0 and 4
inline constexpr uint64_t kFlip4 = 0x1cad21f72c81017cull ^ 0xdb979083e96dd4deull;      // 8 and 16
inline constexpr uint64_t kFlip9Low = 0x1f67b3b7a4a44072ull ^ 0x78e5c0cc4ee679cbull;   // 24 and 32
inline constexpr uint64_t kFlip9High = 0x2172ffcc7dd05a82ull ^ 0x8e2443f7744608b8ull;  // 40 and 48

inline uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9ull;
  return h ^ (h >> 32);
}

inline uint64_t avalanche_xxh64(uint64_t h) {
  h ^= h >> 33;
  h *= 0xC2B2AE3D27D4EB4Full;
  h ^= h >> 29;
  h *= 0x165667B19E3779F9ull;
  return h ^ (h >> 32);
}

inline uint64_t up_to_16(const uint8_t* in, size_t n, uint64_t seed) {
  if (n > 8) {
    const uint64_t low = read_u64(in) ^ (kFlip9Low + seed);
    const uint64_t high = read_u64(in + n - 8) ^ (kFlip9High - seed);
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (n >= 4) {
    seed ^= static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32;
    const uint64_t value = read_u32(in + n - 4) + (static_cast<uint64_t>(read_u32(in)) << 32);
    uint64_t h = value ^ (kFlip4 - seed);
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25ull;
    h ^= (h >> 35) + n;
    h *= 0x9FB21C651E98DF25ull;
    return h ^ (h >> 28);
  }
  if (n) {
    const uint32_t value = static_cast<uint32_t>(in[0]) << 16 | static_cast<uint32_t>(in[n >> 1]) << 24 | in[n - 1] |
                           static_cast<uint32_t>(n) << 8;
    return avalanche_xxh64(value ^ (kFlip1 + seed));
  }
  return avalanche_xxh64(seed ^ kFlip0);
}

// The secret for 4 to 16 bytes under a seed, computed once to hash many strings.
struct ShortSeeds {
  uint64_t low = 0, high = 0, flip = 0;

  ShortSeeds() = default;
  explicit ShortSeeds(uint64_t seed)
      : low(kFlip9Low + seed),
        high(kFlip9High - seed),
        flip(kFlip4 - (seed ^ static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32)) {}
};

// `up_to_16` for 4 to 16 bytes without a branch on the length, which is never the same twice: both ways are gone, one
// is taken. Needs 8 readable bytes at `in`, whatever n.
inline uint64_t from_4_to_16(const uint8_t* in, size_t n, const ShortSeeds& seeds) {
  const uint64_t first = read_u64(in);
  const uint64_t low = first ^ seeds.low;
  const uint64_t high = read_u64(in + (n > 8 ? n : 8) - 8) ^ seeds.high;
  const uint64_t longer = avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
  uint64_t h = (read_u32(in + n - 4) + (first << 32)) ^ seeds.flip;
  h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
  h *= 0x9FB21C651E98DF25ull;
  h ^= (h >> 35) + n;
  h *= 0x9FB21C651E98DF25ull;
  h ^= h >> 28;
  return n > 8 ? longer : h;
}

}  // namespace xxh3

inline uint64_t xxh3_64(const uint8_t* data, size_t size, uint64_t seed) {
  return size <= 16 ? xxh3::up_to_16(data, size, seed) : xxh3_64_longer(data, size, seed);
}

// One-to-one on 64 bits, so different integers never share a key. Multipliers: "moremur" (Evensen, 2019).
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 27;
  x *= 0x3C79AC492BA7B653ull;
  x ^= x >> 33;
  x *= 0x1C69B3F74AC4AE35ull;
  x ^= x >> 27;
  return x;
}

// Key 0 means null: it makes no row. A value whose hash is 0 takes 1.
inline constexpr uint64_t kAbsentKey = 0;
inline uint64_t not_absent(uint64_t h) { return h ? h : 1; }

inline uint64_t key_of_int(int64_t value, uint64_t salt) {
  return not_absent(mix64(static_cast<uint64_t>(value) ^ salt));
}

inline uint64_t key_of_bytes(const uint8_t* data, size_t size, uint64_t salt) {
  return not_absent(xxh3_64(data, size, salt));
}

// A number as an id: its bits as a double, -0 as 0. NaN is null.
inline uint64_t key_of_double(double value, uint64_t salt) {
  if (value != value) return kAbsentKey;
  return key_of_int(std::bit_cast<int64_t>(value == 0 ? 0.0 : value), salt);
}

// Key of a cross: hash of its parts' keys; null if a part is. `seed` belongs to the cross (table and name), so that
// crosses which share a table do not share rows.
uint64_t key_of_cross(const uint64_t* parts, size_t n, uint64_t seed);

// 128 bits, for identities that must not collide over years of events: two XXH3-64 under different seeds.
struct Hash128 {
  uint64_t high = 0;
  uint64_t low = 0;
};
Hash128 hash128_of_bytes(const uint8_t* data, size_t size);
Hash128 hash128_of_int(int64_t value);
Hash128 hash128_of_parts(const Hash128* parts, size_t n);

}  // namespace freshet
