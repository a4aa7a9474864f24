// Runs of packed rows: sorted, collected, kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "table_support.hpp"

namespace freshet {
namespace {

using namespace testing;

TEST(SortKeys, SortsWhateverTheirSpreadAndKeepsEqualKeysInOrder) {
  std::mt19937_64 random(3);
  std::vector<KeyAt> scratch;
  for (const size_t n : {0u, 1u, 5u, 24u, 25u, 400u, 5000u}) {
    for (int spread = 0; spread < 5; spread++) {
      std::vector<KeyAt> keys;
      for (uint32_t i = 0; i < n; i++) {
        const uint64_t key = random();
        const uint64_t chosen[] = {key, key % 7, key >> 40 | uint64_t{1} << 63, ~uint64_t{0} - key % 3,
                                   i == 0 ? ~uint64_t{0} : key % 1000};
        keys.push_back({chosen[spread], i, 0});
      }
      std::vector<KeyAt> sorted = keys;
      std::stable_sort(sorted.begin(), sorted.end(), [](const KeyAt& a, const KeyAt& b) { return a.key < b.key; });
      sort_keys(keys.data(), keys.size(), scratch);
      for (size_t i = 0; i < n; i++) {
        ASSERT_EQ(keys[i].key, sorted[i].key);
        ASSERT_EQ(keys[i].source, sorted[i].source);
      }
    }
  }
}

TEST(Runs, AFlushIsADirectoryInOrderWhoseRunsLieEndToEnd) {
  StoreSpec spec = spec_of({counting_slot()}, 16, 2);
  spec.groups[0].tables = {4, 1};
  spec.groups.push_back({{2}, {counting_slot(3)}, false});
  Store store(spec);
  std::vector<uint64_t> keys = numbered(1, 300);
  Plan plan(16);
  const uint32_t starts[3] = {0, 200, 299};
  const uint8_t tables[2] = {4, 1};
  plan.run(keys.data(), keys.size(), starts, tables, 2);
  const std::vector<float> gradients(2 * plan.unique(), 1.0f);
  const int64_t range[3] = {0, 0, 1};
  const Keys batch{plan.keys.data(), plan.tables.data(), plan.unique(), plan.bucket_starts.data()};
  store.push(range, 1, 0, {{0, batch, gradients.data()}});
  const FlushBatch flushed = store.collect_flush(all_buckets(store), false);

  const RunsView runs = flushed.runs.view();
  EXPECT_EQ(runs_fault(runs, store.packed_widths()), "");
  uint64_t at = 0;
  for (const RunEntry& run : runs.directory) {
    const uint32_t width = store.packed_widths()[run.table];
    EXPECT_EQ(run.at, at);
    EXPECT_EQ(keys_fault(runs, run), "");
    EXPECT_EQ(records_fault(runs, run, width), "");
    at += run.bytes(width);
  }
  EXPECT_EQ(at, runs.body.size());
  EXPECT_EQ(rows_of(flushed), 299u);
  EXPECT_THROW(store.collect_flush({3, 3}, false), std::invalid_argument);
}

TEST(Runs, ChosenRowsArePickedWhateverElseTheirRunsHold) {
  Store store(spec_of({counting_slot()}));
  const std::vector<uint64_t> all = numbered(1, 400);
  push(store, Batch(all), 0, 0, std::vector<float>(2 * all.size(), 1.0f));
  const FlushBatch flushed = store.collect_flush(all_buckets(store), false);
  std::vector<uint64_t> wanted = numbered(300, 500);  // 100 of them are there
  std::sort(wanted.begin(), wanted.end());
  std::vector<int64_t> buckets;
  for (const uint64_t key : wanted) buckets.push_back(static_cast<int64_t>(key >> 60));
  const std::vector<uint8_t> tables(wanted.size(), 0), others(wanted.size(), 1);
  RunColumns picked, none;
  pick_runs(flushed.runs.view(), store.packed_widths(), buckets, tables, wanted, picked);
  pick_runs(flushed.runs.view(), store.packed_widths(), buckets, others, wanted, none);
  EXPECT_EQ(none.directory.size(), 0u);
  EXPECT_EQ(runs_fault(picked.view(), store.packed_widths()), "");
  Store other(spec_of({counting_slot()}));
  other.import_runs(picked.view());
  EXPECT_EQ(other.rows(0), 100);
  for (const float x : look_up(other, Batch(numbered(300, 400)))) EXPECT_EQ(x, -1.0f);
  for (const RunEntry& run : picked.directory) {
    EXPECT_EQ(keys_fault(picked.view(), run), "");
    EXPECT_EQ(records_fault(picked.view(), run, store.packed_widths()[0]), "");
  }
}

TEST(Runs, WhatAFlushHasCollectedStaysWhatItWasWhateverBecomesOfTheRows) {
  Store store(spec_of({counting_slot()}, 16, 1));
  const std::vector<uint64_t> keys = numbered(1, 200);
  push(store, Batch(keys), 0, 0, std::vector<float>(398, 1.0f));
  const FlushBatch kept = store.collect_flush(all_buckets(store), false);
  const std::vector<uint8_t> body(kept.runs.view().body.begin(), kept.runs.view().body.end());

  push(store, Batch(keys), 0, 1, std::vector<float>(398, 1.0f));
  store.remove(0, keys.data(), 100);
  const FlushBatch later = store.collect_flush(all_buckets(store), false);
  for (uint32_t b = 0; b < 16; b++) store.drop_bucket(b);

  EXPECT_EQ(rows_of(kept), 199u);
  EXPECT_TRUE(std::ranges::equal(kept.runs.view().body, body));
  EXPECT_EQ(rows_of(later), 99u);
}

TEST(Runs, AWholeFlushOfSomeBucketsLeavesWhatChangedInTheOthersToTheNext) {
  Store store(spec_of({counting_slot()}, 16, 1));
  push(store, Batch(numbered(1, 200)), 0, 0, std::vector<float>(398, 1.0f));
  const FlushBatch whole = store.collect_flush({3, 9}, true);
  ASSERT_EQ(whole.runs.directory.size(), 2u);
  const FlushBatch rest = store.collect_flush(all_buckets(store), false);
  EXPECT_EQ(rows_of(whole) + rows_of(rest), 199u);
  for (const RunEntry& run : rest.runs.directory) EXPECT_TRUE(run.bucket != 3 && run.bucket != 9);
}

}  // namespace
}  // namespace freshet
