#include "freshet/store.hpp"
#include "freshet/row_steps.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <thread>

#include "table_support.hpp"

namespace freshet {
namespace {

using namespace testing;

TEST(Store, AppliesSkipsAndRefuses) {
  Store store(spec_of({counting_slot()}));
  const Batch batch(numbered(1, 100));
  const std::vector<float> ones(200, 1.0f);

  EXPECT_EQ(push(store, batch, 0, 0, ones), Pushed::applied);
  EXPECT_EQ(push(store, batch, 0, 0, ones), Pushed::skipped);
  EXPECT_EQ(push(store, batch, 0, 2, ones), Pushed::refused);
  for (const float x : look_up(store, batch)) EXPECT_EQ(x, -1.0f);
  EXPECT_THROW(push(store, batch, 2, 0, ones), std::invalid_argument);
  EXPECT_THROW(push(store, batch, 0, -1, ones), std::invalid_argument);
}

// Every row of `batch` `times` times, one behind the other.
struct Repeated {
  Repeated(const Batch& batch, uint32_t buckets, const std::vector<uint32_t>& times) : starts(buckets + 1, 0) {
    const Keys of = batch.keys();
    for (uint32_t b = 0; b < buckets; b++) {
      for (uint32_t r = of.bucket_starts[b]; r < of.bucket_starts[b + 1]; r++) {
        keys.insert(keys.end(), times[r], of.keys[r]);
        tables.insert(tables.end(), times[r], of.tables[r]);
      }
      starts[b + 1] = static_cast<uint32_t>(keys.size());
    }
  }
  Keys view() const { return {keys.data(), tables.data(), keys.size(), starts.data()}; }
  std::vector<uint64_t> keys;
  std::vector<uint8_t> tables;
  std::vector<uint32_t> starts;
};

// More rows than a push steps at a time, so that steps of one row are also in two pieces.
TEST(Store, StepsARowThatAPushNamesAgainInOrder) {
  for (const bool half : {false, true}) {
    Store at_once(spec_of(counted_slots(), 2, 1, half)), apart(spec_of(counted_slots(), 2, 1, half));
    const RowLayout& layout = at_once.layout(0);
    const uint32_t width = layout.width();
    const Batch batch(numbered(1, 90), 2);
    std::vector<uint32_t> times(batch.plan.unique());
    for (size_t r = 0; r < times.size(); r++) times[r] = r % 7 == 3 ? 100 : static_cast<uint32_t>(r % 4);
    const Repeated push(batch, 2, times);
    std::vector<float> gradients(push.keys.size() * width);
    for (size_t i = 0; i < gradients.size(); i++)
      gradients[i] = static_cast<float>((i * 2654435761u) % 2001) / 500.0f - 2.0f;
    gradients[5 * width] = NAN;  // one step of many is refused, the row's others are not

    const int64_t range[3] = {0, 0, 1};
    ASSERT_EQ(at_once.push(range, 1, 0, {{0, push.view(), gradients.data()}}), Pushed::applied);
    std::vector<uint32_t> one_starts(3);
    for (size_t i = 0; i < push.keys.size(); i++) {
      const uint32_t bucket = i >= push.starts[1];
      one_starts = {0, bucket ? 0u : 1u, 1};
      const Keys one{&push.keys[i], &push.tables[i], 1, one_starts.data()};
      const int64_t at[3] = {0, static_cast<int64_t>(i), static_cast<int64_t>(i) + 1};
      ASSERT_EQ(apart.push(at, 1, 0, {{0, one, &gradients[i * width]}}), Pushed::applied);
    }
    const std::vector<float> found = look_up(at_once, batch), wanted = look_up(apart, batch);
    ASSERT_EQ(found, wanted);
    for (size_t r = 0; r < times.size(); r++) {
      uint32_t steps = 0;  // of those not refused, the ones whose gradient of the count is not above 0
      for (size_t i = 0; i < push.keys.size(); i++)
        if (push.keys[i] == batch.keys().keys[r] && i != 5 && gradients[i * width + 1] <= 0.0f) steps++;
      ASSERT_EQ(found[r * width + 1], count_value(count_bucket(static_cast<float>(steps)))) << r;
      ASSERT_EQ(bucket_of_value(found[r * width + 1]), std::bit_width(steps + 1) - 1) << steps;
    }
  }
}

TEST(RowLayout, CountsStepsWhoseGradientIsNotAboveZero) {
  const RowLayout layout(counted_slots(), false, false);
  std::vector<float> values(layout.width()), gradient(layout.width()), state(layout.state_floats());
  layout.initial(values.data(), 1, 0, 1);
  layout.initial_state(values.data(), state.data());
  EXPECT_EQ(values[1], 0.0f);
  for (uint32_t n = 1; n < 5000; n++) {
    ASSERT_TRUE(layout.step_copy(values.data(), state.data(), gradient.data()));
    ASSERT_EQ(bucket_of_value(values[1]), std::min<int>(std::bit_width(n + 1) - 1, kCountBuckets - 1)) << n;
  }
  gradient[1] = 1e-30f;
  const float counted = values[1], steps = state[layout.slots()[1].state_start];
  ASSERT_TRUE(layout.step_copy(values.data(), state.data(), gradient.data()));
  EXPECT_EQ(values[1], counted);
  EXPECT_EQ(state[layout.slots()[1].state_start], steps);
  gradient[0] = INFINITY;
  const std::vector<float> before = values;
  EXPECT_FALSE(layout.step_copy(values.data(), state.data(), gradient.data()));
  EXPECT_EQ(values, before);
  // Whatever a lossy codec makes of it, a bucket is one of those that there are.
  for (const float value : {-1.0f, -0.01f, 0.36f, 5.0f}) {
    EXPECT_GE(bucket_of_value(value), 0);
    EXPECT_LT(bucket_of_value(value), kCountBuckets);
  }
}

TEST(Store, KnowsOnlyTheBucketsThatItHolds) {
  StoreSpec spec = spec_of({counting_slot()});
  spec.held = false;
  Store store(spec);
  const Batch batch(numbered(1, 100)), none(numbered(1, 0));
  const std::vector<float> ones(200, 1.0f);
  EXPECT_TRUE(store.held().empty());
  EXPECT_EQ(push(store, batch, 0, 0, ones), Pushed::refused);
  EXPECT_EQ(push(store, none, 0, 0, {}), Pushed::skipped);
  EXPECT_TRUE(store.collect_flush(all_buckets(store), false).buckets.empty());
  EXPECT_TRUE(store.applied()[0].empty());

  const std::vector<int64_t> from(store.partitions(), 0);
  for (uint32_t b = 0; b < store.buckets(); b++)
    if (b != 3) store.set_applied(b, from.data(), 0);
  EXPECT_EQ(push(store, batch, 0, 0, ones), Pushed::refused);  // rows of bucket 3
  EXPECT_EQ(push(store, none, 0, 0, {}), Pushed::applied);
  const FlushBatch flushed = store.collect_flush(all_buckets(store), false);
  EXPECT_EQ(flushed.buckets.size(), store.buckets() - 1);
  EXPECT_EQ(flushed.rows.size(), flushed.buckets.size());
  EXPECT_EQ(flushed.applied.size(), flushed.buckets.size() * store.partitions());

  store.set_applied(3, from.data(), 0);
  EXPECT_EQ(push(store, batch, 0, 1, ones), Pushed::refused);  // bucket 3 is behind
  EXPECT_EQ(store.applied()[0], (std::set<int64_t>{0, 1}));
}

TEST(Store, TellsWhatEachBucketHadAppliedAsItsRowsWereRead) {
  Store store(spec_of(mixed_slots()));
  const Batch batch(numbered(1, 200), store.buckets());
  std::vector<uint8_t> even(store.buckets());
  for (uint32_t b = 0; b < store.buckets(); b += 2) even[b] = 1;
  std::vector<int64_t> range{1, 0, 5};
  ASSERT_EQ(store.push(range.data(), 1, 0, {}, even.data()), Pushed::applied);
  std::vector<float> out(batch.plan.unique() * store.layout(0).width());
  std::vector<int64_t> known(static_cast<size_t>(store.buckets()) * store.partitions(), -1);
  store.lookup(0, batch.keys(), out.data(), true, nullptr, nullptr, nullptr, known.data());
  const Keys keys = batch.keys();
  for (uint32_t b = 0; b < store.buckets(); b++)
    for (uint32_t p = 0; p < store.partitions(); p++) {
      const bool asked = keys.bucket_starts[b] != keys.bucket_starts[b + 1];
      EXPECT_EQ(known[b * store.partitions() + p], !asked ? -1 : p == 1 && even[b] ? 5 : 0) << b << " " << p;
    }
}

TEST(RowSteps, StepCopiesAsTheStoreStepsItsRows) {
  for (const uint32_t buckets : {16u, 2u}) {  // few rows a bucket, and so many that they are searched
    Store store(spec_of(mixed_slots(), buckets));
    const RowSteps steps(mixed_slots());
    const RowLayout& layout = steps.layout();
    const Batch mine(numbered(1, 100), buckets), theirs(numbered(50, 150), buckets);
    const size_t n = mine.plan.unique();
    std::vector<float> values(n * layout.width()), states(n * layout.state_floats()), now(values), now_states(states);
    store.lookup(0, mine.keys(), values.data(), true, nullptr, nullptr, states.data());
    for (int step = 0; step < 5; step++) {
      std::vector<float> gradients(theirs.plan.unique() * layout.width());
      for (size_t i = 0; i < gradients.size(); i++) gradients[i] = static_cast<float>((i * 7 + step) % 13) - 6.0f;
      ASSERT_EQ(push(store, theirs, 0, step, gradients), Pushed::applied);
      EXPECT_EQ(steps.step(mine.keys(), values.data(), states.data(), theirs.keys(), gradients.data(), buckets), 50u);
      store.lookup(0, mine.keys(), now.data(), true, nullptr, nullptr, now_states.data());
      EXPECT_EQ(values, now);
      EXPECT_EQ(states, now_states);
    }
  }
}

TEST(Store, NeverReadsPastABatchThatLies) {
  Store store(spec_of({counting_slot()}));
  Batch batch(numbered(1, 50));
  std::vector<float> out(100);
  std::vector<uint32_t> starts(17, 0);
  starts[16] = 50;
  Keys keys = batch.keys();
  keys.bucket_starts = starts.data();
  EXPECT_THROW(store.lookup(0, keys, out.data(), true, nullptr), std::invalid_argument);
  starts[3] = 60;
  EXPECT_THROW(store.lookup(0, keys, out.data(), true, nullptr), std::invalid_argument);
  EXPECT_THROW(store.lookup(1, batch.keys(), out.data(), true, nullptr), std::invalid_argument);
}

// Every rule, and bytes on both sides of a flush.
TEST(Store, AStoreRestoredFromItsFlushesGoesOnAlike) {
  for (const bool half : {false, true}) {
    Store first(spec_of(mixed_slots(), 16, 2, half)), second(spec_of(mixed_slots(), 16, 2, half));
    const Batch batch(numbered(1, 400));
    std::vector<float> gradients(batch.plan.unique() * first.layout(0).width());
    for (size_t i = 0; i < gradients.size(); i++) gradients[i] = 0.01f * static_cast<float>(i % 100) - 0.4f;
    for (int64_t at = 0; at < 3; at++) push(first, batch, 1, at, gradients, 5000);

    const FlushBatch flushed = first.collect_flush(all_buckets(first), false);
    second.import_runs(flushed.runs.view());
    for (size_t i = 0; i < flushed.buckets.size(); i++)
      second.set_applied(flushed.buckets[i], flushed.applied.data() + i * 2, flushed.clock_ms[i]);

    for (Store* store : {&first, &second}) EXPECT_EQ(push(*store, batch, 1, 3, gradients), Pushed::applied);
    EXPECT_EQ(look_up(first, batch), look_up(second, batch));
  }
}

TEST(Store, EvictsByAgeAndKeepsWhatIsDirty) {
  StoreSpec spec = spec_of({counting_slot()}, 2, 1);
  spec.tables = {{0, 60'000, 0, 1}};
  Store store(spec);
  push(store, Batch(numbered(1, 500), 2), 0, 0, std::vector<float>(1000, 1.0f), 1'000'000);
  store.collect_flush(all_buckets(store), false);
  push(store, Batch(numbered(400, 600), 2), 0, 1, std::vector<float>(400, 1.0f), 1'000'000);

  const Evicted done = store.evict(1'060'000, 1 << 30);

  EXPECT_EQ(done.evicted, 399);
  EXPECT_EQ(store.evicted(0), 399);
  EXPECT_EQ(store.rows(0), 200);
  EXPECT_EQ(removed_of(store.collect_flush(all_buckets(store), false)), 399u);
  EXPECT_EQ(store.collect_publish(1 << 30).tables[0].keys.size(), 200u);
}

TEST(Store, APublishIsWholeOnceItHasDrainedEveryBucket) {
  Store store(spec_of({counting_slot()}, 16, 1));
  const std::vector<uint64_t> first = numbered(1, 200);
  push(store, Batch(first, 16), 0, 0, std::vector<float>(2 * first.size(), 1.0f));
  std::set<uint64_t> collected;
  int64_t at = 1;
  while (store.drained() < store.buckets()) {
    const PublishBatch batch = store.collect_publish(20);
    for (const PublishedTable& part : batch.tables)
      for (size_t i = 0; i < part.keys.size(); i++) collected.insert(part.keys[i]);
    push(store, Batch(first, 16), 0, at++, std::vector<float>(2 * first.size(), 1.0f));  // all are marked again
    ASSERT_LT(at, 1000);
  }
  EXPECT_EQ(collected, std::set<uint64_t>(first.begin(), first.end()));
  EXPECT_GT(store.pending(0), 0);
  const int64_t before = store.drained();
  store.collect_publish(0);
  EXPECT_EQ(store.drained(), before);
}

TEST(ServedRows, AreNearWithinTheTolerancesOfScalarsAndVector) {
  ServedRows served(8, 2, 18, 4);
  EXPECT_EQ(served.row_bytes(), 2u * 2 + 2 + 16);
  std::vector<float> row(18);
  for (size_t i = 0; i < row.size(); i++) row[i] = 0.01f * static_cast<float>(i + 1) * (i % 3 ? 1.0f : -1.0f);
  const auto scaled = [&](float scalars, float vector) {
    std::vector<float> out = row;
    for (size_t i = 0; i < out.size(); i++) out[i] *= i < 2 ? scalars : vector;
    return out;
  };
  served.set(3, row.data());
  EXPECT_TRUE(served.is_near(3, row.data()));
  EXPECT_TRUE(served.is_near(3, scaled(1.08f, 1.03f).data()));
  EXPECT_FALSE(served.is_near(3, scaled(1.2f, 1.0f).data()));
  EXPECT_FALSE(served.is_near(3, scaled(1.0f, 1.08f).data()));
  for (const float wild : {NAN, INFINITY, -INFINITY, 1e30f}) EXPECT_FALSE(served.is_near(3, scaled(1.0f, wild).data()));
  EXPECT_FALSE(served.is_near(0, row.data()));
  served.move(3, 0);
  EXPECT_TRUE(served.is_near(0, row.data()));
}

TEST(ServedRows, OfScalarsAloneAreKeptInBf16) {
  ServedRows served(4, 1, 1, 2);
  EXPECT_EQ(served.row_bytes(), 2u);
  const float zero = 0.0f, one = 1.0f;
  served.set(1, &zero);
  EXPECT_TRUE(served.is_near(1, &zero));
  EXPECT_FALSE(served.is_near(1, &one));
}

TEST(Store, RowsPublishedRoundedAreOwedExactlyUntilTheyAreCollected) {
  Store store(spec_of({counting_slot()}));
  store.round_published(16, {0});
  const Batch batch(numbered(1, 101));
  push(store, batch, 0, 0, std::vector<float>(200, 1.0f));
  EXPECT_EQ(store.inexact(), 0);
  const int64_t rows = static_cast<int64_t>(store.collect_publish(1 << 30).tables[0].keys.size());
  EXPECT_EQ(store.inexact(), rows);
  EXPECT_EQ(store.collect_inexact(30).tables[0].keys.size(), 30u);
  push(store, batch, 0, 1, std::vector<float>(200, 1.0f));
  EXPECT_TRUE(store.collect_inexact(1 << 30).tables.empty());  // they are to be published first
  store.collect_publish(1 << 30);
  EXPECT_EQ(store.collect_inexact(1 << 30).tables[0].keys.size(), static_cast<size_t>(rows));
  EXPECT_EQ(store.inexact(), 0);
}

TEST(Store, ServingRowsSayWhenTheyWereTouchedAndLookingAtThemIsNoTouch) {
  StoreSpec spec = spec_of({counting_slot()});
  spec.serving = true;
  Store store(spec);
  const std::vector<uint64_t> keys = numbered(1, 4);
  const std::vector<float> values(6, 1.0f);
  const std::vector<uint32_t> first{100, 0, 300}, again{50, 200, 400};
  store.import_values(0, keys.data(), values.data(), 3, 0, first.data());
  store.import_values(0, keys.data(), values.data(), 3, 0, again.data());

  const Batch batch(numbered(1, 6));
  std::map<uint64_t, uint32_t> found;
  for (int turn = 0; turn < 2; turn++) {
    std::vector<float> out(10);
    std::vector<uint32_t> touched(5, 7);
    store.lookup(0, batch.keys(), out.data(), false, nullptr, touched.data());
    for (size_t i = 0; i < 5; i++) found[batch.keys().keys[i]] = touched[i];
    EXPECT_EQ(found,
              (std::map<uint64_t, uint32_t>{
                  {keys[0], 100}, {keys[1], 200}, {keys[2], 400}, {numbered(4, 5)[0], 0}, {numbered(5, 6)[0], 0}}));
  }
}

// What a store that has flushed hands over to another one.
FlushBatch flushed_by_another(const std::vector<uint64_t>& keys) {
  Store store(spec_of({counting_slot()}));
  push(store, Batch(keys), 0, 0, std::vector<float>(2 * keys.size(), 1.0f));
  return store.collect_flush(all_buckets(store), false);
}

void begin_loading(Store& store, int64_t fence) {
  const std::vector<int64_t> from(store.partitions(), 1);
  for (uint32_t b = 0; b < store.buckets(); b++) store.begin_loading(b, from.data(), 0, fence);
}

void settle(Store& store, const Unread& read, int64_t fence) {
  store.settle(read.buckets.data(), read.tables.data(), read.keys.data(), read.keys.size(), fence);
}

TEST(Store, ALoadingBucketAnswersForWhatWasReadAndForNothingElse) {
  StoreSpec spec = spec_of({counting_slot()});
  spec.held = false;
  Store store(spec);
  begin_loading(store, 7);
  const std::vector<uint64_t> stored = numbered(1, 100);
  const Batch known(stored), batch(numbered(1, 120));
  std::vector<float> out(2 * 119);
  EXPECT_TRUE(store.lookup(0, batch.keys(), out.data(), true, nullptr)->unread);
  EXPECT_EQ(store.counts().created, 0);
  EXPECT_EQ(push(store, batch, 0, 1, std::vector<float>(2 * 119, 1.0f)), Pushed::unread);
  EXPECT_EQ(push(store, batch, 0, 0, std::vector<float>(2 * 119, 1.0f)), Pushed::skipped);
  EXPECT_EQ(store.applied()[0], std::set<int64_t>{1});
  const Unread unread = store.unread({{0, batch.keys()}});
  EXPECT_EQ(unread.keys.size(), 119u);
  EXPECT_EQ(unread.fences, std::vector<int64_t>(119, 7));

  const FlushBatch rows = flushed_by_another(stored);
  store.import_unread(rows.runs.view(), 6);  // of an earlier claim
  settle(store, unread, 6);
  EXPECT_EQ(store.unread({{0, batch.keys()}}).keys.size(), 119u);
  store.import_unread(rows.runs.view(), 7);
  for (const float x : look_up(store, known)) EXPECT_EQ(x, -1.0f);
  EXPECT_EQ(store.unread({{0, batch.keys()}}).keys.size(), 20u);
  settle(store, unread, 7);
  EXPECT_EQ(push(store, batch, 0, 1, std::vector<float>(2 * 119, 1.0f)), Pushed::applied);
  store.import_unread(rows.runs.view(), 7);  // the scan comes to them later
  for (const float x : look_up(store, known)) EXPECT_EQ(x, -2.0f);
  EXPECT_EQ(store.rows(0), 119);
}

TEST(Store, ALoadingBucketIsNeitherFlushedNorEvictedFromUntilItIsLoaded) {
  StoreSpec spec = spec_of({counting_slot()});
  spec.held = false;
  spec.tables = {{0, 1'000, 0, 1}};
  Store store(spec);
  begin_loading(store, 7);
  const std::vector<uint64_t> keys = numbered(1, 100);
  store.import_unread(flushed_by_another(keys).runs.view(), 7);
  EXPECT_EQ(store.evict(3'600'000, 1'000'000).evicted, 0);
  EXPECT_TRUE(store.collect_flush(all_buckets(store), false).buckets.empty());
  EXPECT_FALSE(store.finish_loading(3, 6));
  for (uint32_t b = 0; b < store.buckets(); b++) EXPECT_TRUE(store.finish_loading(b, 7));
  EXPECT_FALSE(store.finish_loading(3, 7));
  const FlushBatch flushed = store.collect_flush(all_buckets(store), false);
  EXPECT_EQ(flushed.buckets.size(), store.buckets());
  EXPECT_EQ(rows_of(flushed), 0u);  // nothing has changed
  int64_t stored = 0;
  for (const int64_t rows : flushed.rows) stored += rows;
  EXPECT_EQ(stored, 99);
  EXPECT_EQ(store.evict(3'600'000, 1'000'000).evicted, 99);
}

TEST(Store, ADroppedBucketIsLoadedAnewFromNothing) {
  StoreSpec spec = spec_of({counting_slot()});
  spec.held = false;
  Store store(spec);
  begin_loading(store, 7);
  const std::vector<uint64_t> keys = numbered(1, 100);
  const Batch batch(keys);
  const Unread unread = store.unread({{0, batch.keys()}});
  settle(store, unread, 7);
  EXPECT_FALSE(store.lookup(0, batch.keys(), std::vector<float>(198).data(), true, nullptr));
  const std::vector<int64_t> from(store.partitions(), 1);
  EXPECT_THROW(store.begin_loading(3, from.data(), 0, 8), std::invalid_argument);  // it has rows
  for (uint32_t b = 0; b < store.buckets(); b++) store.drop_bucket(b);
  begin_loading(store, 8);
  EXPECT_EQ(store.unread({{0, batch.keys()}}).keys.size(), 99u);  // a key that was absent then may be there now
  settle(store, unread, 7);
  EXPECT_EQ(store.unread({{0, batch.keys()}}).keys.size(), 99u);
  store.set_applied(3, from.data(), 0);  // held, and loaded by other means
  for (const int64_t bucket : store.unread({{0, batch.keys()}}).buckets) EXPECT_NE(bucket, 3);
}

TEST(Store, ThreadsMayDoEverythingAtOnce) {
  StoreSpec spec = spec_of({counting_slot()}, 16, 3);
  spec.tables = {{0, 3'600'000, 2'000, 1}};
  Store store(spec);
  constexpr int64_t pushes = 200;
  std::atomic<int> running{2};
  const auto lane = [&](int64_t partition) {
    for (int64_t at = 0; at < pushes; at++) {
      const uint64_t first = 1 + static_cast<uint64_t>(at % 50) * 20;
      const Batch batch(numbered(first, first + 200));
      std::vector<float> out(400);
      store.lookup(0, batch.keys(), out.data(), true, nullptr);
      ASSERT_EQ(push(store, batch, partition, at, std::vector<float>(400, 1.0f), at), Pushed::applied);
    }
    running--;
  };
  std::thread one(lane, 0), two(lane, 2);
  int64_t flushed = 0;
  while (running || !flushed) {
    const FlushBatch batch = store.collect_flush(all_buckets(store), false);
    flushed += static_cast<int64_t>(rows_of(batch));
    store.collect_publish(300);
    store.evict(1'000, 100);
    store.applied();
    store.bytes();
    const Batch reading(numbered(1, 1200));
    look_up(store, reading);
  }
  one.join();
  two.join();
  float sum = 0;
  for (const float x : look_up(store, Batch(numbered(1, 1200)))) sum += x;
  EXPECT_EQ(sum, -2.0f * 2 * pushes * 200);
}

TEST(Store, BucketsComeAndGoBesidePushes) {
  Store store(spec_of({counting_slot()}, 16, 2));
  std::atomic<bool> done{false};
  std::thread lane([&] {
    const Batch batch(numbered(1, 200));
    for (int64_t at = 0; at < 300; at++) push(store, batch, 0, at, std::vector<float>(400, 1.0f));
    done = true;
  });
  std::vector<int64_t> offsets(2);
  while (!done) {
    store.drop_bucket(3);
    store.applied_of(4, offsets.data());
    store.set_applied(3, offsets.data(), 0);
    store.collect_flush(all_buckets(store), true);
  }
  lane.join();
  const std::vector<std::set<int64_t>> applied = store.applied();
  EXPECT_LE(applied[0].size(), 2u);
  EXPECT_EQ(applied[1], std::set<int64_t>{0});
}

TEST(Store, ServingTablesAreReadWhileTheyGrowAndShrink) {
  StoreSpec spec = spec_of(mixed_slots());
  spec.serving = true;
  Store store(spec);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    const std::vector<float> values(500 * store.layout(0).width(), 3.0f);
    for (uint64_t turn = 0; turn < 40; turn++) {
      const std::vector<uint64_t> keys = numbered(1 + turn * 100, 501 + turn * 100);
      store.import_values(0, keys.data(), values.data(), keys.size(), 0);
      store.remove(0, keys.data(), 100);
    }
    done = true;
  });
  const Batch batch(numbered(1, 4000));
  while (!done)
    for (const float x : look_up(store, batch)) ASSERT_TRUE(x == 0.0f || x == 3.0f);
  writer.join();
  EXPECT_EQ(store.rows(0), 400);
}

}  // namespace
}  // namespace freshet
