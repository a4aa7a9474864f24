// Kafka's partitioner: the murmur2 that Java producers use, so that records keyed by either side meet in a partition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace freshet {

uint32_t murmur2(const uint8_t* data, size_t size);

// Partition of each key, value i being data[ends[i-1]:ends[i]]; an empty key is hashed like any other.
// `partitions` >= 1, out.size() == ends.size(). Throws std::invalid_argument if ends do not fit data.
void partition_of(std::span<const uint8_t> data, std::span<const int64_t> ends, int32_t partitions,
                  std::span<int32_t> out);

}  // namespace freshet
