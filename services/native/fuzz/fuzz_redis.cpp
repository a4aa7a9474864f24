// What a Redis answers of a bucket's hash: made into sound runs that write the same hash again, or refused.
#include <cstdlib>
#include <string>
#include <vector>

#include "freshet/redis_hash.hpp"

using namespace freshet;

namespace {

RecordWidths widths() {
  RecordWidths out{};
  out[0] = 3, out[2] = 8;
  return out;
}

// The input is items, each after a byte that says how long it is.
std::vector<std::span<const u8>> items_of(const u8* data, size_t size) {
  std::vector<std::span<const u8>> items;
  while (size > 0) {
    const size_t n = std::min<size_t>(data[0], size - 1);
    items.push_back({data + 1, n});
    data += n + 1, size -= n + 1;
  }
  return items;
}

std::vector<u8> rows(std::vector<std::pair<u8, u8>> tables_and_keys) {
  std::vector<u8> out;
  for (const auto& [table, key] : tables_and_keys) {
    out.insert(out.end(), {9, table, key, 0, 0, 0, 0, 0, 0, 1});
    const u8 width = static_cast<u8>(widths()[table]);
    out.push_back(width);
    out.insert(out.end(), width, key);
  }
  return out;
}

}  // namespace

std::vector<std::vector<std::uint8_t>> fuzz_seeds();
std::vector<std::vector<std::uint8_t>> fuzz_seeds() {
  return {rows({{0, 1}, {2, 7}, {0, 3}}), rows({{2, 1}, {2, 1}, {0, 9}, {0, 2}, {0, 4}})};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::vector<std::span<const u8>> items = items_of(data, size);
  const HashRows hash{6, items};
  RunColumns runs;
  size_t failed = 0;
  if (!runs_of_hashes({&hash, 1}, widths(), 40, runs, failed).empty()) return 0;
  const RunsView view = runs.view();
  if (!runs_fault(view, widths()).empty()) std::abort();
  u64 count = 0;
  for (const RunEntry& run : runs.directory) {
    if (!keys_fault(view, run).empty() || !records_fault(view, run, widths()[run.table]).empty()) std::abort();
    count += run.rows;
  }
  if (count > items.size() / 2) std::abort();
  const std::string key = "{m:6}:rows";
  const i64 bucket = 6, end = static_cast<i64>(key.size());
  HashWrites writes;
  if (!hash_writes(view, widths(), {&bucket, 1}, {{reinterpret_cast<const u8*>(key.data()), key.size()}, {&end, 1}}, 2, writes)
           .empty())
    std::abort();
  if (writes.set_commands[0] != static_cast<i64>((count + 1) / 2) || writes.set_ends[0] != static_cast<i64>(writes.sets.size()))
    std::abort();
  return 0;
}
