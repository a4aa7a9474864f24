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

inline std::uint64_t read_u64(const std::uint8_t* p) {
  std::uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline std::uint32_t read_u32(const std::uint8_t* p) {
  std::uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// XXH3 with 64-bit output, written from its specification (doc/xxhash_spec.md of the xxHash project, "XXH3").
// Any length; `data` may be null if size is 0.
std::uint64_t xxh3_64(const std::uint8_t* data, std::size_t size, std::uint64_t seed);

// One-to-one on 64 bits, so different integers never share a key. Multipliers: "moremur" (Evensen, 2019).
inline std::uint64_t mix64(std::uint64_t x) {
  x ^= x >> 27;
  x *= 0x3C79AC492BA7B653ull;
  x ^= x >> 33;
  x *= 0x1C69B3F74AC4AE35ull;
  x ^= x >> 27;
  return x;
}

// Key 0 means null: it makes no row. A value whose hash is 0 takes 1.
inline constexpr std::uint64_t kAbsentKey = 0;
inline std::uint64_t not_absent(std::uint64_t h) { return h ? h : 1; }

inline std::uint64_t key_of_int(std::int64_t value, std::uint64_t salt) {
  return not_absent(mix64(static_cast<std::uint64_t>(value) ^ salt));
}

inline std::uint64_t key_of_bytes(const std::uint8_t* data, std::size_t size, std::uint64_t salt) {
  return not_absent(xxh3_64(data, size, salt));
}

// A number as an id: its bits as a double, -0 as 0. NaN is null.
inline std::uint64_t key_of_double(double value, std::uint64_t salt) {
  if (value != value) return kAbsentKey;
  return key_of_int(std::bit_cast<std::int64_t>(value == 0 ? 0.0 : value), salt);
}

// Key of a cross: hash of its parts' keys; null if a part is. `seed` belongs to the cross (table and name), so that
// crosses which share a table do not share rows.
std::uint64_t key_of_cross(const std::uint64_t* parts, std::size_t n, std::uint64_t seed);

// 128 bits, for identities that must not collide over years of events: two XXH3-64 under different seeds.
struct Hash128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
};
Hash128 hash128_of_bytes(const std::uint8_t* data, std::size_t size);
Hash128 hash128_of_int(std::int64_t value);
Hash128 hash128_of_parts(const Hash128* parts, std::size_t n);

}  // namespace freshet
