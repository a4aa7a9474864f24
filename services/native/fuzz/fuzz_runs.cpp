// Directories and bodies of runs, as a row store's file has them: merged to something sound, or refused.
#include <cstdlib>
#include <stdexcept>

#include "../tests/table_support.hpp"
#include "freshet/block.hpp"

using namespace freshet;

namespace {

constexpr uint32_t kBuckets = 4;

StoreSpec spec() { return testing::spec_of({testing::counting_slot()}, kBuckets, 1); }

// Directory and body one after the other: the first byte is the number of entries.
std::vector<uint8_t> some_runs(bool removed) {
  Store store(spec());
  const std::vector<uint64_t> keys = testing::numbered(1, 9);
  testing::push(store, testing::Batch(keys, kBuckets), 0, 0, std::vector<float>(16, 1.0f));
  if (removed) {
    store.collect_flush(testing::all_buckets(store), false);
    store.remove(0, keys.data(), 3);
    testing::push(store, testing::Batch(testing::numbered(5, 7), kBuckets), 0, 1, std::vector<float>(4, 1.0f));
  }
  const FlushBatch flushed = store.collect_flush(testing::all_buckets(store), false);
  const RunsView runs = flushed.runs.view();
  std::vector<uint8_t> out{static_cast<uint8_t>(runs.directory.size())};
  const uint8_t* entries = reinterpret_cast<const uint8_t*>(runs.directory.data());
  out.insert(out.end(), entries, entries + runs.directory.size_bytes());
  out.insert(out.end(), runs.body.begin(), runs.body.end());
  return out;
}

// Corrects the checksums of runs within the body, so that the code behind them is reached.
void mend(std::vector<RunEntry>& directory, std::span<const uint8_t> body, const RecordWidths& widths) {
  for (RunEntry& run : directory) {
    if (run.table > 1 || run.at > body.size() || run.bytes(widths[run.table]) > body.size() - run.at) continue;
    seal(run, body.data() + run.at, widths[run.table]);
  }
}

void check(const RunColumns& merged, const RecordWidths& widths, bool keep_removed) {
  const RunsView runs = merged.view();
  if (!runs_fault(runs, widths).empty()) std::abort();
  for (const RunEntry& run : runs.directory) {
    if (!keys_fault(runs, run).empty() || !records_fault(runs, run, widths[run.table]).empty()) std::abort();
    if (!keep_removed && run.removed) std::abort();
  }
}

}  // namespace

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() { return {some_runs(false), some_runs(true)}; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<uint8_t> other = some_runs(false);
  Store store(spec());
  const RecordWidths widths = store.packed_widths();
  const size_t most = size ? (size - 1) / sizeof(RunEntry) : 0, n = size ? std::min<size_t>(data[0], most) : 0;
  std::vector<RunEntry> directory(n);
  if (n) std::memcpy(directory.data(), data + 1, n * sizeof(RunEntry));
  const std::span<const uint8_t> body(data + (size ? 1 : 0) + n * sizeof(RunEntry), data + size);
  const uint8_t* intact = other.data() + 1;
  const RunsView beneath{{reinterpret_cast<const RunEntry*>(intact), other[0]},
                         std::span(other).subspan(1 + other[0] * sizeof(RunEntry)),
                         0};
  for (const bool mended : {false, true}) {
    if (mended) mend(directory, body, widths);
    const RunsView runs{directory, body, 0};
    for (const bool keep_removed : {false, true}) {
      RunColumns merged;
      size_t failed = 0;
      const RunsView sources[2] = {runs, beneath};
      const std::string why = merge_runs(sources, widths, keep_removed, 40, merged, failed);
      if (why.empty())
        check(merged, widths, keep_removed);
      else if (failed != 0)
        std::abort();
    }
    try {
      store.import_runs(runs);
    } catch (const std::invalid_argument&) {
      if (store.rows(0) + store.rows(1) != 0) std::abort();
      continue;
    }
    uint64_t unpacked = 0;
    for (const UnpackedTable& part : store.unpack_runs(runs)) unpacked += part.keys.size();
    if (unpacked < static_cast<uint64_t>(store.rows(0) + store.rows(1))) std::abort();
    if (store.collect_flush(testing::all_buckets(store), false).runs.directory.size())
      std::abort();  // stored, not changed
    const FlushBatch whole = store.collect_flush(testing::all_buckets(store), true);
    check(whole.runs, widths, false);
    for (uint32_t b = 0; b < kBuckets; b++) store.drop_bucket(b);
    const int64_t none = 0;
    for (uint32_t b = 0; b < kBuckets; b++) store.set_applied(b, &none, 0);
  }
  return 0;
}
