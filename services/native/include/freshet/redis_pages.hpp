// Rows as pages of Redis hashes: the arguments of commands that write runs as pages, and the runs of given pages. The
// rows of a bucket are one hash. Each field is a page: a run of one table as one flush wrote it, or a part of one. If
// several pages have a key, the one of the highest seq decides.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "freshet/runs.hpp"

namespace freshet {

// The field: the data by which a reader can skip a page. Never written twice with another content, as long as
// nothing that Redis had acknowledged is lost.
struct __attribute__((packed)) PageName {
  uint64_t seq;   // of the flush; of merged pages, the newest one's
  uint32_t part;  // counts a flush's pages of a bucket; those that hold a bucket whole have page_of_all set
  uint32_t table;
  uint64_t first, last;  // of the page's keys and removed keys
};
static_assert(sizeof(PageName) == 32);

constexpr uint32_t kPageOfAll = 1u << 31;

// The value: this, then keys, removed keys and records as in a run.
struct __attribute__((packed)) PageHead {
  uint32_t rows, removed;
  uint32_t keys_crc, records_crc;  // CRC-32, as in a run's entry
};
static_assert(sizeof(PageHead) == 16);

// Pages of K buckets, bucket after bucket.
struct PageWrites {
  Column<uint8_t> arguments;   // field, value, field, value ... as arguments of a command in RESP
  std::vector<int64_t> ends;   // of each page in `arguments`
  std::vector<int64_t> pages;  // (K,) how many
};

// Pages of the runs of `buckets` (rising), each of its bucket's seq. No value is longer than `page_bytes`, but one of a
// single row. Returns the fault of the runs, or an empty string.
std::string page_writes(const RunsView& runs, const RecordWidths& widths, std::span<const int64_t> buckets,
                        std::span<const int64_t> seqs, bool whole, uint32_t page_bytes, PageWrites& out);

// Pages of one bucket, as HGETALL answers them: field, value, field, value ...
struct PagesOfBucket {
  uint32_t bucket;
  std::span<const std::span<const uint8_t>> items;
};

// The rows that pages add up to, as runs; nothing older than the pages exists. Runs longer than `most_bytes` are cut.
// Returns the fault of bucket `failed`, or an empty string; all bytes that were used are checked.
std::string runs_of_pages(std::span<const PagesOfBucket> buckets, const RecordWidths& widths, uint64_t most_bytes,
                          RunColumns& out, size_t& failed);

}  // namespace freshet
