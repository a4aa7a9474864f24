// What a Redis answers of a bucket's hash: made into sound runs whose pages give the same rows again, or refused.
#include <cstdlib>
#include <string>
#include <vector>

#include "freshet/redis_pages.hpp"

using namespace freshet;

namespace {

RecordWidths widths() {
  RecordWidths out{};
  out[0] = 3, out[2] = 8;
  return out;
}

// The input is items, each after a byte with its length.
std::vector<std::span<const uint8_t>> items_of(const uint8_t* data, size_t size) {
  std::vector<std::span<const uint8_t>> items;
  while (size > 0) {
    const size_t n = std::min<size_t>(data[0], size - 1);
    items.push_back({data + 1, n});
    data += n + 1, size -= n + 1;
  }
  return items;
}

RunColumns some_runs(std::vector<uint64_t> keys, uint32_t removed, uint32_t table) {
  RunColumns runs;
  const uint32_t width = widths()[table], rows = static_cast<uint32_t>(keys.size()) - removed;
  RunEntry run{6, table, rows, removed, 0, 0, 0};
  uint8_t* bytes = runs.body.extend(run.bytes(width));
  std::memcpy(bytes, keys.data(), 8 * keys.size());
  std::memset(bytes + 8 * keys.size(), 'x', size_t{rows} * width);
  seal(run, bytes, width);
  runs.directory.push_back(run);
  return runs;
}

PageWrites pages_of(const RunColumns& runs, int64_t seq, uint32_t page_bytes) {
  PageWrites out;
  const int64_t bucket = 6;
  if (!page_writes(runs.view(), widths(), {&bucket, 1}, {&seq, 1}, false, page_bytes, out).empty()) std::abort();
  return out;
}

// Field and value of every page, of RESP arguments.
std::vector<std::span<const uint8_t>> arguments(const PageWrites& writes) {
  std::vector<std::span<const uint8_t>> items;
  for (const uint8_t *at = writes.arguments.begin(), *end = writes.arguments.end(); at < end;) {
    size_t n = 0;
    for (at++; *at != '\r'; at++) n = 10 * n + (*at - '0');
    items.push_back({at + 2, n});
    at += 2 + n + 2;
  }
  return items;
}

void append(std::vector<uint8_t>& out, const PageWrites& writes) {
  for (const auto& item : arguments(writes)) {
    if (item.size() > 255) std::abort();
    out.push_back(static_cast<uint8_t>(item.size()));
    out.insert(out.end(), item.begin(), item.end());
  }
}

}  // namespace

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() {
  std::vector<uint8_t> one, two;
  append(one, pages_of(some_runs({1, 4, 9, 4}, 1, 0), 5, 200));
  append(two, pages_of(some_runs({1, 2, 3}, 0, 2), 5, 40));
  append(two, pages_of(some_runs({2, 7, 3}, 1, 2), 6, 200));
  return {one, two};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<std::span<const uint8_t>> items = items_of(data, size);
  const PagesOfBucket pages{6, items};
  RunColumns runs;
  size_t failed = 0;
  if (!runs_of_pages({&pages, 1}, widths(), 40, runs, failed).empty()) return 0;
  const RunsView view = runs.view();
  if (!runs_fault(view, widths()).empty()) std::abort();
  for (const RunEntry& run : runs.directory)
    if (!keys_fault(view, run).empty() || !records_fault(view, run, widths()[run.table]).empty() || run.removed)
      std::abort();
  const PageWrites writes = pages_of(runs, 9, 50);
  const std::vector<std::span<const uint8_t>> written = arguments(writes);
  if (static_cast<int64_t>(written.size()) != 2 * writes.pages[0]) std::abort();
  const PagesOfBucket again{6, written};
  RunColumns same;
  if (!runs_of_pages({&again, 1}, widths(), 40, same, failed).empty()) std::abort();
  if (!std::equal(same.body.begin(), same.body.end(), runs.body.begin(), runs.body.end())) std::abort();
  return 0;
}
