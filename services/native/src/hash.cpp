#include "freshet/hash.hpp"

#include <algorithm>
#include <array>

namespace freshet {
namespace {

using xxh3::avalanche;
using xxh3::fold;

constexpr uint64_t kPrime32[4] = {0, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[6] = {
    0, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

// The default secret of the specification.
constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t mix16(const uint8_t* in, const uint8_t* secret, uint64_t seed) {
  return fold(read_u64(in) ^ (read_u64(secret) + seed), read_u64(in + 8) ^ (read_u64(secret + 8) - seed));
}

uint64_t hash_17_to_128(const uint8_t* in, size_t n, uint64_t seed) {
  uint64_t acc = n * kPrime64[1];
  for (size_t i = (n - 1) / 32; i > 0; --i) {
    acc += mix16(in + 16 * i, kSecret + 32 * i, seed);
    acc += mix16(in + n - 16 * (i + 1), kSecret + 32 * i + 16, seed);
  }
  acc += mix16(in, kSecret, seed);
  acc += mix16(in + n - 16, kSecret + 16, seed);
  return avalanche(acc);
}

uint64_t hash_129_to_240(const uint8_t* in, size_t n, uint64_t seed) {
  uint64_t acc = n * kPrime64[1];
  for (size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, kSecret + 16 * i, seed);
  acc = avalanche(acc);
  for (size_t i = 8; i < n / 16; ++i) acc += mix16(in + 16 * i, kSecret + 16 * (i - 8) + 3, seed);
  acc += mix16(in + n - 16, kSecret + 136 - 17, seed);
  return avalanche(acc);
}

using Lanes = std::array<uint64_t, 8>;

inline void accumulate(Lanes& acc, const uint8_t* in, const uint8_t* secret) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t data = read_u64(in + 8 * i);
    const uint64_t keyed = data ^ read_u64(secret + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
  }
}

uint64_t hash_long(const uint8_t* in, size_t n, uint64_t seed) {
  constexpr size_t kStripe = 64, kStripes = (sizeof kSecret - kStripe) / 8, kBlock = kStripe * kStripes;
  uint8_t secret[sizeof kSecret];
  for (size_t i = 0; i < sizeof kSecret; i += 16) {
    const uint64_t low = read_u64(kSecret + i) + seed, high = read_u64(kSecret + i + 8) - seed;
    std::memcpy(secret + i, &low, 8);
    std::memcpy(secret + i + 8, &high, 8);
  }
  Lanes acc = {kPrime32[3], kPrime64[1], kPrime64[2], kPrime64[3], kPrime64[4], kPrime32[2], kPrime64[5], kPrime32[1]};
  const size_t blocks = (n - 1) / kBlock;
  for (size_t b = 0; b < blocks; ++b) {
    for (size_t s = 0; s < kStripes; ++s) accumulate(acc, in + b * kBlock + s * kStripe, secret + 8 * s);
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t key = read_u64(secret + sizeof secret - kStripe + 8 * i);
      acc[i] = (acc[i] ^ (acc[i] >> 47) ^ key) * kPrime32[1];
    }
  }
  const uint8_t* rest = in + blocks * kBlock;
  const size_t stripes = (n - 1 - blocks * kBlock) / kStripe;
  for (size_t s = 0; s < stripes; ++s) accumulate(acc, rest + s * kStripe, secret + 8 * s);
  accumulate(acc, in + n - kStripe, secret + sizeof secret - kStripe - 7);
  uint64_t h = n * kPrime64[1];
  for (size_t i = 0; i < 4; ++i) {
    h += fold(acc[2 * i] ^ read_u64(secret + 11 + 16 * i), acc[2 * i + 1] ^ read_u64(secret + 11 + 16 * i + 8));
  }
  return avalanche(h);
}

// Arbitrary, but frozen: identities already in the log were made with them.
constexpr uint64_t kSeedHigh = 0x8c1f3a5b79d2e604ull;
constexpr uint64_t kSeedLow = 0x35f0c96a1e7bd482ull;

}  // namespace

uint64_t xxh3_64_longer(const uint8_t* data, size_t size, uint64_t seed) {
  if (size <= 128) return hash_17_to_128(data, size, seed);
  if (size <= 240) return hash_129_to_240(data, size, seed);
  return hash_long(data, size, seed);
}

uint64_t key_of_cross(const uint64_t* parts, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; ++i) {
    if (parts[i] == kAbsentKey) return kAbsentKey;
  }
  return not_absent(xxh3_64(reinterpret_cast<const uint8_t*>(parts), n * sizeof(uint64_t), seed));
}

Hash128 hash128_of_bytes(const uint8_t* data, size_t size) {
  return {xxh3_64(data, size, kSeedHigh), xxh3_64(data, size, kSeedLow)};
}

Hash128 hash128_of_int(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  return {mix64(bits ^ kSeedHigh), mix64(bits ^ kSeedLow)};
}

Hash128 hash128_of_parts(const Hash128* parts, size_t n) {
  return n == 1 ? parts[0] : hash128_of_bytes(reinterpret_cast<const uint8_t*>(parts), n * sizeof(Hash128));
}

}  // namespace freshet
