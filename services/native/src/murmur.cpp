#include "freshet/murmur.hpp"

#include "freshet/bytes_column.hpp"
#include "freshet/hash.hpp"

namespace freshet {

// Source: org.apache.kafka.common.utils.Utils.murmur2, from Appleby's MurmurHash2 (public domain).
uint32_t murmur2(const uint8_t* data, size_t size) {
  constexpr uint32_t m = 0x5bd1e995;
  uint32_t h = 0x9747b28c ^ static_cast<uint32_t>(size);
  const size_t words = size / 4;
  for (size_t i = 0; i < words; ++i) {
    uint32_t k = read_u32(data + 4 * i) * m;
    k = (k ^ (k >> 24)) * m;
    h = (h * m) ^ k;
  }
  const uint8_t* tail = data + 4 * words;
  const size_t rest = size % 4;
  if (rest) {
    for (size_t i = rest; i-- > 0;) h ^= static_cast<uint32_t>(tail[i]) << (8 * i);
    h *= m;
  }
  h ^= h >> 13;
  h *= m;
  return h ^ (h >> 15);
}

void partition_of(std::span<const uint8_t> data, std::span<const int64_t> ends, int32_t partitions,
                  std::span<int32_t> out) {
  const BytesView view(data, ends);
  for (size_t i = 0; i < view.size(); ++i) {
    const auto key = view[i];
    out[i] = static_cast<int32_t>(murmur2(key.data(), key.size()) & 0x7fffffff) % partitions;
  }
}

}  // namespace freshet
