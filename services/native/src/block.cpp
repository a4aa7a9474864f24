#include "freshet/block.hpp"

#include <cstring>

#include "freshet/hash.hpp"

namespace freshet {
namespace {

constexpr size_t kPerSample = 8 + 8 + 8 + 4 + 4 + 4 + 1;

// Bytes of the columns of n samples, padded so that payloads start at a multiple of 8.
size_t columns_bytes(size_t n) { return (n * kPerSample + 7) / 8 * 8; }

template <class T>
const uint8_t* take(const uint8_t* p, size_t n, std::vector<T>& out) {
  const size_t old = out.size();
  out.resize(old + n);
  std::memcpy(out.data() + old, p, n * sizeof(T));
  return p + n * sizeof(T);
}

template <class T>
void put(BytesColumn& out, const T* values, size_t n) {
  out.append(reinterpret_cast<const uint8_t*>(values), n * sizeof(T));
}

std::string read_block(std::span<const uint8_t> block, BlockColumns& out) {
  if (block.size() < kBlockHeader) return "expected a header of 16 bytes, found " + std::to_string(block.size());
  const uint8_t* p = block.data();
  if (p[0] != kBlockMagic) return "expected the magic byte 0xB1, found " + std::to_string(p[0]);
  if (p[1] != kBlockVersion) return "expected version 1, found " + std::to_string(p[1]);
  if (p[2] || p[3]) return "expected flags 0, found " + std::to_string(p[2] | p[3] << 8);
  const size_t n = read_u32(p + 8);
  if (n < 1) return "expected at least one sample, found none";
  if (n > block.size() / kPerSample || kBlockHeader + columns_bytes(n) > block.size()) {
    return "expected the columns of " + std::to_string(n) + " samples, found " + std::to_string(block.size()) +
           " bytes";
  }
  const uint32_t crc = block_crc32(p + kBlockHeader, block.size() - kBlockHeader);
  if (crc != read_u32(p + 12)) {
    return "expected the checksum " + std::to_string(read_u32(p + 12)) + ", found " + std::to_string(crc);
  }
  const uint8_t* ends = p + kBlockHeader + n * (8 + 8 + 8 + 4 + 4);
  const size_t payload_bytes = block.size() - kBlockHeader - columns_bytes(n);
  uint32_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t end = read_u32(ends + 4 * i);
    if (end < last) {
      return "expected payload " + std::to_string(i) + " to end at " + std::to_string(last) + " or after it, found " +
             std::to_string(end);
    }
    last = end;
  }
  if (last != payload_bytes) {
    return "expected " + std::to_string(last) + " bytes of payloads, found " + std::to_string(payload_bytes);
  }
  out.counts.push_back(static_cast<uint32_t>(n));
  out.schema_ids.push_back(read_u32(p + 4));
  p = take(p + kBlockHeader, n, out.sample_ids);
  p = take(p, n, out.times_ms);
  p = take(p, n, out.requests);
  p = take(p, n, out.values);
  p = take(p, n, out.weights);
  const auto before = static_cast<int64_t>(out.payloads.data.size());
  for (size_t i = 0; i < n; ++i) out.payloads.ends.push_back(before + read_u32(p + 4 * i));
  take(p + 4 * n, n, out.labels);
  out.payloads.append(block.data() + block.size() - payload_bytes, payload_bytes);
  return {};
}

}  // namespace

std::string read_blocks(std::span<const uint8_t> data, std::span<const int64_t> ends, BlockColumns& out,
                        size_t& failed) {
  const BytesView blocks(data, ends);
  out.payloads.data.reserve(data.size());
  for (failed = 0; failed < blocks.size(); ++failed) {
    auto why = read_block(blocks[failed], out);
    if (!why.empty()) return why;
  }
  return {};
}

void encode_blocks(uint32_t schema_id, const BlockInput& samples, const BytesView& payloads,
                   std::span<const int64_t> block_ends, BytesColumn& out) {
  const size_t n = samples.sample_ids.size();
  if (samples.times_ms.size() != n || samples.requests.size() != n || samples.values.size() != n ||
      samples.weights.size() != n || samples.labels.size() != n || payloads.size() != n) {
    throw std::invalid_argument("a block's columns must be of equal length");
  }
  size_t start = 0;
  for (const int64_t block_end : block_ends) {
    if (block_end <= static_cast<int64_t>(start) || block_end > static_cast<int64_t>(n)) {
      throw std::invalid_argument("block ends must rise from 1 to the number of samples");
    }
    const auto stop = static_cast<size_t>(block_end);
    const size_t count = stop - start;
    const int64_t first = payloads.start(start), bytes = payloads.end(stop - 1) - first;
    if (bytes > UINT32_MAX || count > UINT32_MAX) throw std::length_error("a block holds at most 4 GiB of payloads");
    const size_t at = out.data.size();
    const uint8_t head[4] = {kBlockMagic, kBlockVersion, 0, 0};
    const uint32_t words[3] = {schema_id, static_cast<uint32_t>(count), 0};
    put(out, head, 4);
    put(out, words, 3);
    put(out, samples.sample_ids.data() + start, count);
    put(out, samples.times_ms.data() + start, count);
    put(out, samples.requests.data() + start, count);
    put(out, samples.values.data() + start, count);
    put(out, samples.weights.data() + start, count);
    for (size_t i = start; i < stop; ++i) {
      const auto end = static_cast<uint32_t>(payloads.end(i) - first);
      put(out, &end, 1);
    }
    put(out, samples.labels.data() + start, count);
    out.data.resize(at + kBlockHeader + columns_bytes(count));
    out.append(payloads.data().data() + first, static_cast<size_t>(bytes));
    const uint32_t crc = block_crc32(out.data.data() + at + kBlockHeader, out.data.size() - at - kBlockHeader);
    std::memcpy(out.data.data() + at + 12, &crc, sizeof crc);
    out.close();
    start = stop;
  }
  if (start != n) throw std::invalid_argument("the last block must end with the last sample");
}

}  // namespace freshet
