// Rows as fields of Redis hashes. A bucket's rows are one hash: field = table id (u8) and key (u64, little-endian), value =
// packed record. Here are the commands that write runs into such hashes, and the runs that such hashes hold.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "freshet/runs.hpp"

namespace freshet {

constexpr size_t hash_field_bytes = 9;

// Keys of hashes: key i ends at ends[i] of `bytes`, and begins where the one before ends.
struct HashKeys {
  std::span<const u8> bytes;
  std::span<const i64> ends;
};

// RESP of what K buckets' runs say, bucket after bucket.
struct HashWrites {
  Column<u8> sets;                  // HSET commands
  std::vector<i64> set_ends;        // (K,) of each bucket's in `sets`
  std::vector<i64> set_commands;    // (K,) how many they are
  Column<u8> removed;               // removed fields, as arguments of a command
  std::vector<i64> removed_ends;    // (K,) of each bucket's in `removed`
  std::vector<i64> removed_fields;  // (K,) how many they are
};

// Commands for the runs of `buckets` (rising), whose hashes have these keys; no command sets more rows than
// `rows_per_command`. Returns what is wrong with the runs, or an empty string.
std::string hash_writes(const RunsView& runs, const RecordWidths& widths, std::span<const i64> buckets, const HashKeys& keys,
                        u32 rows_per_command, HashWrites& out);

// What HGETALL, or several HSCANs, answered of one bucket: field, value, field, value ...
struct HashRows {
  u32 bucket;
  std::span<const std::span<const u8>> items;
};

// The runs of these hashes, in the order given. A field that comes twice counts once, the first time. Runs longer than
// `most_bytes` are cut. Returns what is wrong with hash `failed`, or an empty string.
std::string runs_of_hashes(std::span<const HashRows> hashes, const RecordWidths& widths, u64 most_bytes, RunColumns& out,
                           size_t& failed);

}  // namespace freshet
