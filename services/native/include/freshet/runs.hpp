// Runs of packed rows: the form of a flush, of a segment of the row store and of a scan.
//
// A run is rows and removed keys of one table of one bucket: uint64_t keys (rising), uint64_t removed keys (rising,
// none of them among the keys), then the packed records, little-endian and at any alignment. A table of a bucket may
// come in several runs; no key is in two of one source.
#pragma once

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "freshet/simd.hpp"
#include "freshet/table_column.hpp"

namespace freshet {

// Where a run lies. Directories are arrays of these, sorted by (bucket, table).
struct __attribute__((packed)) RunEntry {
  uint32_t bucket, table, rows, removed;
  uint64_t at;           // of its first byte
  uint32_t keys_crc;     // CRC-32 of keys and removed keys
  uint32_t records_crc;  // CRC-32 of the records

  uint64_t keys_bytes() const { return 8 * (uint64_t{rows} + removed); }
  uint64_t bytes(uint32_t width) const { return keys_bytes() + uint64_t{rows} * width; }
  uint64_t place() const { return uint64_t{bucket} << 32 | table; }
};
static_assert(sizeof(RunEntry) == 32);

// Bytes of a record for each table id; 0: no such table.
using RecordWidths = std::array<uint32_t, 256>;

// Runs in memory of the caller: places of the directory count from `start` bytes before `body`. Gaps are allowed.
struct RunsView {
  std::span<const RunEntry> directory;
  std::span<const uint8_t> body;
  uint64_t start = 0;

  const uint8_t* of(const RunEntry& run) const { return body.data() + (run.at - start); }
};

// Runs end to end, the first at 0.
struct RunColumns {
  Column<RunEntry> directory;
  Column<uint8_t> body;

  RunsView view() const { return {{directory.data(), directory.size()}, {body.data(), body.size()}, 0}; }
};

inline uint64_t load_key(const uint8_t* keys, size_t i) {
  uint64_t key;
  std::memcpy(&key, keys + 8 * i, 8);
  return key;
}
inline void store_key(uint8_t* keys, size_t i, uint64_t key) { std::memcpy(keys + 8 * i, &key, 8); }

// The fault of the places of these runs, or an empty string: tables are known, sorted, and within the body.
std::string runs_fault(const RunsView& runs, const RecordWidths& widths);

// The fault of the keys, or of the records, of a run that lies within its body, or an empty string.
std::string keys_fault(const RunsView& runs, const RunEntry& run);
std::string records_fault(const RunsView& runs, const RunEntry& run, uint32_t width);

// Fill in both checksums of a run that has been written.
void seal(RunEntry& run, const uint8_t* bytes, uint32_t width);

// Merges the runs of several sources; the first source that has a key decides. Without `keep_removed` no older source
// exists, and removed keys are dropped. Runs longer than `most_bytes` are split. Returns the fault of source `failed`,
// or an empty string. Every byte that is read is checked; records of a run that newer ones replace are not read.
std::string merge_runs(std::span<const RunsView> newest_first, const RecordWidths& widths, bool keep_removed,
                       uint64_t most_bytes, RunColumns& out, size_t& failed);

// The rows of chosen keys, (n,) each, sorted by (bucket, table, key). Checksums are computed, those of `runs` are not
// verified. A key is in one run.
void pick_runs(const RunsView& runs, const RecordWidths& widths, std::span<const int64_t> buckets,
               std::span<const uint8_t> tables, std::span<const uint64_t> keys, RunColumns& out);

// A key on its way to its place, and where it comes from.
struct KeyAt {
  uint64_t key;
  uint32_t source;
  uint32_t row;
};

// Sort by key; equal keys stay in the order given. Made for the keys of one bucket, which are hashes and so spread
// evenly between the least and the largest; any others are sorted too, only slower.
void sort_keys(KeyAt* keys, size_t n, std::vector<KeyAt>& scratch);

}  // namespace freshet
