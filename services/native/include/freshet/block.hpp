// Blocks: records of the samples topic, up to a few hundred samples each (schemas/README.md, "Samples: blocks").
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "freshet/bytes_column.hpp"

namespace freshet {

inline constexpr uint8_t kBlockMagic = 0xB1;
inline constexpr uint8_t kBlockVersion = 1;
inline constexpr size_t kBlockHeader = 16;

// CRC-32 of zlib (reflected, polynomial 0x04C11DB7), by carry-less multiplication where the processor has it.
uint32_t block_crc32(const uint8_t* data, size_t size, uint32_t crc = 0);

// Samples in columns: of one block to be written, or of many blocks read.
struct BlockColumns {
  std::vector<uint32_t> counts;      // (blocks,) samples of each
  std::vector<uint32_t> schema_ids;  // (blocks,)
  std::vector<int64_t> sample_ids;   // (N,)
  std::vector<int64_t> times_ms;     // (N,)
  std::vector<uint64_t> requests;    // (N,)
  std::vector<float> values;         // (N,)
  std::vector<float> weights;        // (N,)
  std::vector<uint8_t> labels;       // (N,)
  BytesColumn payloads;              // (N,)
};

// Read blocks end to end. Returns the fault of block `failed`, or an empty string.
std::string read_blocks(std::span<const uint8_t> data, std::span<const int64_t> ends, BlockColumns& out,
                        size_t& failed);

// One block of n samples, all spans of n; n >= 1. payload_ends: uint32_t each, counted from the first payload byte.
struct BlockInput {
  std::span<const int64_t> sample_ids;
  std::span<const int64_t> times_ms;
  std::span<const uint64_t> requests;
  std::span<const float> values;
  std::span<const float> weights;
  std::span<const uint8_t> labels;
};

// Append to `out` one block for each run of samples that `block_ends` (rising, the last is n) cuts off.
// Throws std::invalid_argument if lengths do not agree, std::length_error if a block's payloads exceed 4 GiB.
void encode_blocks(uint32_t schema_id, const BlockInput& samples, const BytesView& payloads,
                   std::span<const int64_t> block_ends, BytesColumn& out);

}  // namespace freshet
