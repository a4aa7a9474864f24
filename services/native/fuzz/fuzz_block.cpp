// Blocks of hostile bytes: a block that can be read must be written back to the same bytes.
#include <cstdlib>
#include <cstring>

#include "freshet/block.hpp"

using namespace freshet;

namespace {

BytesColumn some_block() {
  const std::vector<int64_t> ids{1, 2, 3}, times{10, 20, 30}, ends{2, 2, 5}, cut{3};
  const std::vector<uint64_t> requests{7, 7, 8};
  const std::vector<float> values{0, 1, 2}, weights{1, 1, 0.5f};
  const std::vector<uint8_t> labels{0, 1, 0}, payloads{'a', 'b', 'c', 'd', 'e'};
  BytesColumn out;
  encode_blocks(5, {ids, times, requests, values, weights, labels}, BytesView(payloads, ends), cut, out);
  return out;
}

}  // namespace

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() { return {some_block().data}; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> block(data, data + size);
  const std::vector<int64_t> ends{static_cast<int64_t>(size)};
  // As it is (the checksum stops most), then with a correct checksum, so that the code behind it is reached.
  for (const bool mended : {false, true}) {
    if (mended && size >= kBlockHeader) {
      const uint32_t crc = block_crc32(block.data() + kBlockHeader, size - kBlockHeader);
      std::memcpy(block.data() + 12, &crc, sizeof crc);
    }
    BlockColumns read;
    size_t failed = 0;
    if (!read_blocks(block, ends, read, failed).empty()) continue;
    if (read.sample_ids.size() != read.counts[0] || read.payloads.ends.size() != read.counts[0]) std::abort();
    BytesColumn again;
    const std::vector<int64_t> cut{static_cast<int64_t>(read.counts[0])};
    encode_blocks(read.schema_ids[0],
                  {read.sample_ids, read.times_ms, read.requests, read.values, read.weights, read.labels},
                  BytesView(read.payloads.data, read.payloads.ends), cut, again);
    if (again.data.size() != size) std::abort();
  }
  return 0;
}
