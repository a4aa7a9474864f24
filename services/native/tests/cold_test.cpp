#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <random>
#include <thread>

#include "cold_support.hpp"

namespace freshet {
namespace {

using namespace testing;

// What differs first, "" if nothing does.
std::string difference(const FlushBatch& a, const FlushBatch& b) {
  if (a.buckets != b.buckets) return "buckets";
  if (a.applied != b.applied || a.clock_ms != b.clock_ms) return "applied";
  for (size_t i = 0; i < a.rows.size(); i++)
    if (a.rows[i] != b.rows[i])
      return "stored rows of bucket " + std::to_string(a.buckets[i]) + ": " + std::to_string(a.rows[i]) + " and " +
             std::to_string(b.rows[i]);
  for (size_t i = 0; i < std::min(a.runs.directory.size(), b.runs.directory.size()); i++) {
    const RunEntry &x = a.runs.directory[i], &y = b.runs.directory[i];
    if (x.bucket != y.bucket || x.table != y.table || x.rows != y.rows || x.removed != y.removed)
      return "run " + std::to_string(i) + " of bucket " + std::to_string(x.bucket) + ": " + std::to_string(x.rows) +
             " rows, " + std::to_string(x.removed) + " removed, and " + std::to_string(y.rows) + ", " +
             std::to_string(y.removed);
  }
  if (a.runs.directory.size() != b.runs.directory.size()) return "number of runs";
  return std::equal(a.runs.body.begin(), a.runs.body.end(), b.runs.body.begin(), b.runs.body.end()) ? "" : "bytes";
}

// Two stores get the same calls; one of them keeps a tenth of its rows in memory.
struct Pair {
  explicit Pair(StoreSpec spec, size_t memory_bytes = 300'000) : whole(spec), tiered(spec) {
    tiered.keep_cold(tight(memory_bytes));
  }
  void push(const Batch& batch, std::mt19937_64& random, int64_t clock_ms) {
    std::vector<float> gradients(batch.plan.unique() * whole.layout(0).width());
    for (float& x : gradients) x = static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) / 500.0f;
    ASSERT_EQ(testing::push(whole, batch, 0, offset, gradients, clock_ms), Pushed::applied);
    ASSERT_EQ(testing::push(tiered, batch, 0, offset, gradients, clock_ms), Pushed::applied);
    offset++;
  }
  Store whole, tiered;
  int64_t offset = 0;
};

Batch some(std::mt19937_64& random, uint64_t keys, size_t n) {
  std::vector<uint64_t> chosen;
  for (size_t i = 0; i < n; i++) {
    const double x = static_cast<double>(random() >> 11) * 0x1p-53;
    chosen.push_back(key_of(1 + static_cast<uint64_t>(static_cast<double>(keys) * x * x * x)));
  }
  return Batch(chosen);
}

// Whether more rows than that have left memory, and come back. How many do in so many turns depends on the processor
// time that the moving thread gets, so tests go on until enough have.
bool has_moved(const Store& store, int64_t rows) {
  const ColdCounts counts = store.cold_counts();
  return counts.spilled > rows && counts.fetched > rows;
}

TEST(Cold, GivesWhatAStoreInMemoryGives) {
  for (const bool half : {false, true}) {
    StoreSpec spec = spec_of(mixed_slots(), 16, 2, half);
    spec.tables = {{0, 400'000, 0, 1}};
    Pair pair(spec);
    const size_t empty = pair.tiered.bytes();
    std::mt19937_64 random(half);
    constexpr uint64_t kKeys = 12'000;
    for (int64_t turn = 0; turn < 150 || !has_moved(pair.tiered, 500); turn++) {
      const int64_t clock_ms = turn * 5'000;
      const Batch batch = some(random, kKeys, 500);
      ASSERT_EQ(look_up(pair.whole, batch, true), look_up(pair.tiered, batch, true)) << turn;
      pair.push(batch, random, clock_ms);
      switch (random() % 12) {
        case 0: {
          const bool all = random() % 4 == 0;
          ASSERT_EQ(difference(pair.whole.collect_flush(all_buckets(pair.whole), all),
                               pair.tiered.collect_flush(all_buckets(pair.tiered), all)),
                    "")
              << turn;
          break;
        }
        case 1: {
          const Batch gone = some(random, kKeys, 50);
          const Keys keys = gone.keys();
          ASSERT_EQ(pair.whole.remove(0, keys.keys, keys.n), pair.tiered.remove(0, keys.keys, keys.n));
          break;
        }
        case 2:
          for (Store* store : {&pair.whole, &pair.tiered})
            while (!store->evict(clock_ms, 1'000).finished) {
            }
          break;
        case 3: {
          const PublishBatch a = pair.whole.collect_publish(100'000), b = pair.tiered.collect_publish(100'000);
          const auto put_back = [](Store& store, const PublishBatch& out) {
            for (const PublishedTable& t : out.tables)
              store.put_back_published(t.table, t.keys.data(), t.keys.size(), t.removed.data(), t.removed.size());
          };
          if (random() % 2) put_back(pair.whole, a), put_back(pair.tiered, b);
          ASSERT_EQ(pair.whole.pending(publish), pair.tiered.pending(publish));
          break;
        }
        case 4: {
          const Batch asked = some(random, kKeys, 100);
          const size_t bytes = pair.whole.layout(0).packed_bytes(), n = asked.plan.unique();
          std::vector<uint8_t> a(n * bytes), b(n * bytes), found_a(n), found_b(n);
          pair.whole.export_rows(0, asked.keys().keys, n, a.data(), found_a.data());
          pair.tiered.export_rows(0, asked.keys().keys, n, b.data(), found_b.data());
          ASSERT_EQ(found_a, found_b) << turn;
          ASSERT_EQ(a, b) << turn;
          if (random() % 2) {
            pair.whole.import_rows(0, asked.keys().keys, a.data(), 0, bytes);
            for (size_t i = 0; i < n; i++)
              if (found_a[i])
                for (Store* store : {&pair.whole, &pair.tiered})
                  store->import_rows(0, asked.keys().keys + i, a.data() + i * bytes, 1, bytes);
          }
          break;
        }
        case 5:
          if (random() % 8 == 0) {
            const auto bucket = static_cast<uint32_t>(random() % 16);
            const int64_t offsets[2] = {pair.offset, 0};
            for (Store* store : {&pair.whole, &pair.tiered}) {
              store->drop_bucket(bucket);
              store->set_applied(bucket, offsets, clock_ms);
            }
          }
          break;
      }
      ASSERT_EQ(pair.whole.rows(0), pair.tiered.rows(0)) << turn;
      ASSERT_EQ(pair.whole.pending(flush), pair.tiered.pending(flush)) << turn;
    }
    ASSERT_EQ(difference(pair.whole.collect_flush(all_buckets(pair.whole), true),
                         pair.tiered.collect_flush(all_buckets(pair.tiered), true)),
              "");
    for (const uint32_t bucket : all_buckets(pair.tiered)) pair.tiered.drop_bucket(bucket);
    EXPECT_EQ(pair.tiered.bytes(), empty);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(120);  // what is being moved comes first
    while (pair.tiered.cold_counts().bytes_in_use && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    EXPECT_EQ(pair.tiered.cold_counts().bytes_in_use, 0);
  }
}

// Lanes push while another thread flushes: the rows of the last flush of each key must hold every step.
TEST(Cold, LosesNoStepOfLanesThatMeet) {
  constexpr uint64_t kKeys = 8'000;
  constexpr int kLanes = 3, kTurns = 150;
  Store store(spec_of({counting_slot()}, 16, kLanes));
  store.keep_cold(tight(120'000));
  std::atomic<int> left{kLanes};
  std::vector<std::map<uint64_t, int>> steps(kLanes);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; lane++)
    lanes.emplace_back([&, lane] {
      std::mt19937_64 random(static_cast<uint64_t>(lane));
      for (int64_t turn = 0; turn < kTurns || !has_moved(store, 1'000); turn++) {
        const Batch batch = some(random, kKeys, 400);
        const std::vector<float> ones(batch.plan.unique() * 2, 1.0f);
        look_up(store, batch, true);
        ASSERT_EQ(push(store, batch, lane, turn, ones, turn * 1'000), Pushed::applied);
        for (size_t i = 0; i < batch.plan.unique(); i++) steps[static_cast<size_t>(lane)][batch.keys().keys[i]]++;
      }
      left--;
    });
  std::map<uint64_t, float> stored;
  const auto take = [&] {
    const FlushBatch batch = store.collect_flush(all_buckets(store), false);
    for (const RunEntry& run : batch.runs.directory) {
      const uint8_t* keys = batch.runs.body.data() + run.at;
      const uint8_t* records = keys + run.keys_bytes();
      for (uint32_t i = 0; i < run.rows; i++) {
        float value;
        std::memcpy(&value, records + i * store.layout(0).packed_bytes() + 8, 4);
        stored[load_key(keys, i)] = value;
      }
    }
  };
  while (left > 0) {
    take();
    store.collect_publish(100'000);
  }
  for (std::thread& lane : lanes) lane.join();
  take();
  std::map<uint64_t, int> all;
  for (const auto& lane : steps)
    for (const auto& [key, n] : lane) all[key] += n;
  ASSERT_EQ(all.size(), stored.size());
  for (const auto& [key, n] : all) ASSERT_EQ(stored[key], -static_cast<float>(n)) << key;
}

StoreSpec serving_spec() {
  StoreSpec spec = spec_of(mixed_slots());
  spec.serving = true;
  return spec;
}

// What a server has of a batch: it looks up, fetches what may be on disk, and looks up again. A row that leaves again
// in between must not count as absent.
std::map<uint64_t, std::vector<float>> served(Store& store, const Batch& batch) {
  const Keys keys = batch.keys();
  const size_t width = store.layout(0).width();
  std::vector<float> out(keys.n * width);
  std::vector<uint8_t> found(keys.n), here(keys.n, 1);
  const auto waits = [&] {
    for (size_t i = 0; i < keys.n; i++)
      if (found[i] == kPerhapsOnDisk && here[i]) return true;
    return false;
  };
  for (store.lookup(0, keys, out.data(), false, found.data()); waits();
       store.lookup(0, keys, out.data(), false, found.data()))
    store.fetch(0, keys, here.data());
  std::map<uint64_t, std::vector<float>> rows;
  for (size_t i = 0; i < keys.n; i++)
    if (found[i] == kHere) {
      const auto row = out.begin() + static_cast<ptrdiff_t>(i * width);
      rows[keys.keys[i]].assign(row, row + static_cast<ptrdiff_t>(width));
    }
  return rows;
}

TEST(Cold, ServesWhatAStoreInMemoryServes) {
  Store whole(serving_spec()), tiered(serving_spec());
  tiered.keep_cold(tight(200'000));
  std::mt19937_64 random(3);
  constexpr uint64_t kKeys = 12'000;
  const size_t width = whole.layout(0).width();
  for (int turn = 0; turn < 600 || !has_moved(tiered, 5'000); turn++) {
    const Batch batch = some(random, kKeys, 300);
    const Keys keys = batch.keys();
    if (random() % 4 == 0) {
      for (Store* store : {&whole, &tiered}) store->remove(0, keys.keys, keys.n / 4);
    } else {
      std::vector<float> values(keys.n * width);
      for (float& x : values) x = static_cast<float>(random() % 1000);
      for (Store* store : {&whole, &tiered}) store->import_values(0, keys.keys, values.data(), keys.n, 0);
    }
    const Batch asked = some(random, kKeys, 300);
    ASSERT_EQ(served(whole, asked), served(tiered, asked)) << turn;
  }
  // Counts are estimates between merges; keys that a filter only seems to have, one in ten, are in them.
  EXPECT_NEAR(static_cast<double>(tiered.rows(0)), static_cast<double>(whole.rows(0)), 0.1 * kKeys);
}

TEST(Cold, FindsRowsOfBucketsWithoutPages) {
  Store store(serving_spec());
  store.keep_cold(tight(64 << 20));  // none leaves memory
  std::mt19937_64 random(4);
  const Batch batch = some(random, 12'000, 300);
  const Keys keys = batch.keys();
  const std::vector<float> values(keys.n * store.layout(0).width(), 1.0f);
  store.import_values(0, keys.keys, values.data(), keys.n, 0);
  std::vector<uint8_t> here(keys.n);
  store.fetch(0, keys, here.data());
  EXPECT_EQ(std::count(here.begin(), here.end(), 1), static_cast<int64_t>(keys.n));
}

// However little memory there is, and while other rows leave it.
TEST(Cold, ServesAllRowsOfARequestAfterOneFetch) {
  Store store(serving_spec());
  store.keep_cold({folder(), 1, 0, std::chrono::minutes(10)});  // longer than the test, on however busy a machine
  constexpr uint64_t kKeys = 2'000;
  const size_t width = store.layout(0).width();
  const std::vector<uint64_t> all = numbered(1, kKeys + 1), others = numbered(kKeys + 1, kKeys + 201);
  const std::vector<float> values(kKeys * width, 1.0f);
  const auto wait_until_left = [&](int64_t rows) {
    while (store.cold_counts().spilled < rows) std::this_thread::yield();
  };
  store.import_values(0, all.data(), values.data(), kKeys, 0);
  wait_until_left(kKeys);
  std::mt19937_64 random(5);
  for (int turn = 0; turn < 3; turn++) {
    const Batch batch = some(random, kKeys, 300);
    const Keys keys = batch.keys();
    std::vector<uint8_t> here(keys.n), found(keys.n);
    std::vector<float> out(keys.n * width);
    store.fetch(0, keys, here.data());
    const int64_t before = store.cold_counts().spilled;
    store.import_values(0, others.data(), values.data(), others.size(), 0);
    wait_until_left(before + 200);
    store.lookup(0, keys, out.data(), false, found.data());
    EXPECT_EQ(std::count(found.begin(), found.end(), kPerhapsOnDisk), 0);
  }
}

TEST(Cold, ServesTheLastValuesWhileRowsComeAndLeave) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.serving = true;
  Store store(spec);
  store.keep_cold(tight(60'000));
  constexpr uint64_t kKeys = 6'000;
  const std::vector<uint64_t> keys = numbered(1, kKeys + 1);
  std::atomic<float> written{0.0f}, writing{0.0f};
  const auto write = [&](float value) {
    writing = value;
    for (size_t at = 0; at < kKeys; at += 500)
      store.import_values(0, keys.data() + at, std::vector<float>(500 * 16, value).data(), 500, 0);
    written = value;
  };
  write(1.0f);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (uint64_t seed : {1, 2})
    readers.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      while (!done) {
        const float least = written;
        const Batch batch = some(random, kKeys, 50);
        const auto rows = served(store, batch);
        const float most = writing;
        ASSERT_EQ(rows.size(), batch.plan.unique());
        for (const auto& [key, row] : rows) {
          ASSERT_GE(row[0], least) << key;
          ASSERT_LE(row[0], most) << key;
        }
      }
    });
  for (float value = 2.0f; value < 20.0f || !has_moved(store, 1'000); value++) write(value);
  done = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(Cold, GoesOnInMemoryWhileTheDiskIsFull) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, false};
  Store store(spec);
  store.keep_cold({folder(), 200'000, 1});
  for (int64_t turn = 0; turn < 20; turn++) {
    const Batch batch(numbered(1 + 500 * static_cast<uint64_t>(turn), 501 + 500 * static_cast<uint64_t>(turn)));
    ASSERT_EQ(push(store, batch, 0, turn, std::vector<float>(500 * 16, 1.0f)), Pushed::applied);
  }
  EXPECT_EQ(store.rows(0), 10'000);
  const Batch all(numbered(1, 10'001));
  for (const float x : look_up(store, all)) ASSERT_EQ(x, -1.0f);
  EXPECT_TRUE(store.cold_counts().full);
  for (const uint32_t bucket : all_buckets(store)) store.drop_bucket(bucket);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (store.cold_counts().full && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_FALSE(store.cold_counts().full) << "memory suffices again";
}

TEST(Cold, CountsEachRowThatLeavesOrComesBack) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, true};
  Store store(spec);
  store.keep_cold(tight(1));
  const Batch all(numbered(1, 2'001));
  ASSERT_EQ(push(store, all, 0, 0, std::vector<float>(2'000 * 16, 1.0f)), Pushed::applied);
  const auto on_disk = [&] {
    wait_until_spilled(store, 2'000);
    return store.cold_counts();
  };
  EXPECT_EQ(on_disk().spilled, 2'000);
  look_up(store, all);  // the disk has these rows as they are, so they leave without being written
  const ColdCounts read = on_disk();
  EXPECT_GE(read.fetched, 2'000);
  EXPECT_EQ(read.spilled - read.fetched, 2'000);
  ASSERT_EQ(rows_of(store.collect_flush(all_buckets(store), false)), 2'000u);
  const ColdCounts flushed = on_disk();
  EXPECT_GE(flushed.fetched, read.fetched + 2'000);
  EXPECT_EQ(flushed.spilled - flushed.fetched, 2'000);
}

TEST(Cold, ReturnsPagesOfRemovedRowsWhileTheDiskIsFull) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, false};
  spec.tables = {{0, 1'000'000, 0, 1}};
  Store store(spec);
  store.keep_cold({folder(), 2'000'000, 64 << 20});
  int64_t turn = 0;
  for (int64_t full = 0; full < 60; full += store.cold_counts().full, turn++) {
    const auto first = static_cast<uint64_t>(1 + 5'000 * turn);
    const Batch batch(numbered(first, first + 5'000));
    ASSERT_EQ(push(store, batch, 0, turn, std::vector<float>(5'000 * 16, 1.0f), turn * 10'000), Pushed::applied);
  }
  const int64_t most = store.cold_counts().bytes_in_use;
  while (!store.evict((turn + 90) * 10'000, 100'000).finished) {  // the rows of some ten pushes stay
  }
  ASSERT_LT(store.rows(0), 60'000);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while ((store.cold_counts().full || store.cold_counts().bytes_in_use > most / 2) &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_FALSE(store.cold_counts().full);
  EXPECT_LT(store.cold_counts().bytes_in_use, most / 2);
}

TEST(Cold, IsLoadedWithinItsMemory) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, true};
  Store whole(spec), tiered(spec);
  ASSERT_EQ(push(whole, Batch(numbered(1, 100'001)), 0, 0, std::vector<float>(100'000 * 16, 1.0f)), Pushed::applied);
  const FlushBatch stored = whole.collect_flush(all_buckets(whole), true);
  constexpr size_t kMemory = 1'000'000;
  tiered.keep_cold(tight(kMemory));
  tiered.import_runs(stored.runs.view());
  const size_t a_run = whole.bytes() / 16;  // the last one comes after the last wait
  EXPECT_LT(tiered.bytes(), kMemory + 2 * a_run);
  ASSERT_EQ(difference(tiered.collect_flush(all_buckets(tiered), true), stored), "applied");
}

// The descriptor of this process's file of cold rows, which has no name.
int cold_descriptor() {
  for (int fd = 3; fd < 1024; fd++) {
    char to[256] = {};
    if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), to, sizeof to - 1) > 0 &&
        std::string(to).starts_with(folder()) && std::string(to).ends_with("(deleted)"))
      return fd;
  }
  return -1;
}

// Change every nth of so many pages of the file, from its start.
void damage(size_t pages, size_t nth = 1) {
  const int fd = open(("/proc/self/fd/" + std::to_string(cold_descriptor())).c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  const auto end = std::min<size_t>(pages * 4096, static_cast<size_t>(lseek(fd, 0, SEEK_END)));
  for (size_t at = 100; at < end; at += nth * 4096) ASSERT_EQ(pwrite(fd, "x", 1, static_cast<off_t>(at)), 1);
  close(fd);
}

TEST(Cold, FlushesNothingAfterAFault) {
  StoreSpec spec = spec_of({counting_slot(16)});
  Store store(spec);
  store.keep_cold(tight());
  std::vector<uint64_t> keys = numbered(1, 10'001);
  std::erase_if(keys, [](uint64_t key) { return key >> 60 == 0; });  // bucket 0 of 16 stays empty
  const std::vector<float> gradients(keys.size() * 16, 1.0f);
  ASSERT_EQ(push(store, Batch(keys), 0, 0, gradients), Pushed::applied);
  store.collect_publish(10'000);
  wait_until_spilled(store, 5'000);
  damage(SIZE_MAX / 4096);
  EXPECT_THROW(store.collect_flush(all_buckets(store), false), ColdFault);
  // The rows that were copied before the fault count as flushed, so no offsets may pass them.
  EXPECT_THROW(store.collect_flush({0}, false), ColdFault);
}

// Its lanes use rows of an undamaged bucket alone, so no error but that of the moving thread can reach them.
TEST(Cold, EndsLanesThatWaitAfterTheMovingThreadHasFailed) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, false};
  Store store(spec);
  store.keep_cold(tight());
  const auto is_first = [](uint64_t key) { return key >> 60 == 0; };  // of 16 buckets
  std::vector<uint64_t> others = numbered(1, 10'001);
  std::erase_if(others, is_first);
  ASSERT_EQ(push(store, Batch(others), 0, 0, std::vector<float>(others.size() * 16, 1.0f)), Pushed::applied);
  wait_until_spilled(store, 5'000);
  damage(SIZE_MAX / 4096);  // a merge of one of these buckets ends the moving thread
  const auto fill = [&] {
    for (int64_t turn = 0; turn < 200; turn++) {
      const auto from = static_cast<uint64_t>(20'000 + turn * 10'000);
      std::vector<uint64_t> keys = numbered(from, from + 10'000);
      std::erase_if(keys, [&](uint64_t key) { return !is_first(key); });
      push(store, Batch(keys), 1, turn, std::vector<float>(keys.size() * 16, 1.0f));
    }
  };
  EXPECT_THROW(fill(), ColdFault);
  EXPECT_THROW(store.check_cold(), ColdFault);
}

TEST(Cold, ServesOtherRowsThanThoseOfADamagedPage) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.serving = true;
  Store store(spec);
  constexpr size_t kMemory = 300'000;
  store.keep_cold(tight(kMemory));
  const auto write = [&](uint64_t first, uint64_t last) {
    const std::vector<uint64_t> keys = numbered(first, last);
    store.import_values(0, keys.data(), std::vector<float>(keys.size() * 16, 1.0f).data(), keys.size(), 0);
  };
  write(1, 10'001);
  wait_until_spilled(store, 5'000);
  damage(400, 50);  // some are free, or are written anew
  const auto found = [&] {
    try {
      store.check_cold();
      return false;
    } catch (const ColdFault&) {
      return true;
    }
  };
  for (uint64_t turn = 1; turn < 20 || !found(); turn++) {  // merges come upon them
    ASSERT_LT(turn, 400u);
    write(10'000 * turn + 1, 10'000 * turn + 5'001);
  }
  size_t lost = 0;
  for (uint64_t first = 1; first < 10'001; first += 10) {
    const Batch batch(numbered(first, first + 10));
    try {
      EXPECT_EQ(served(store, batch).size(), 10u);
    } catch (const ColdFault&) {
      lost++;
    }
  }
  EXPECT_LT(lost, 500u) << "of 1,000 batches; a page has some 40 rows";
}

// A store of these 10,000 rows, at least half of them on disk alone.
std::unique_ptr<Store> mostly_on_disk(const Batch& batch) {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, false};
  auto store = std::make_unique<Store>(spec);
  store->keep_cold(tight(200'000));
  EXPECT_EQ(push(*store, batch, 0, 0, std::vector<float>(10'000 * 16, 1.0f)), Pushed::applied);
  wait_until_spilled(*store, 5'000);
  return store;
}

// As where the disk wrote a page in another's place, or not at all: its checksum is right.
TEST(Cold, NamesAPageInThePlaceOfAnotherOfItsBucket) {
  const Batch batch(numbered(1, 10'001));
  const auto made = mostly_on_disk(batch);
  Store& store = *made;
  for (int64_t before = 0; before != store.cold_counts().pages_written;) {  // a page that is written anew is found, too
    before = store.cold_counts().pages_written;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const int fd = open(("/proc/self/fd/" + std::to_string(cold_descriptor())).c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  const ColdRows format(folder(), std::make_shared<DiskBudget>(0), store.layout(0).packed_bytes(), 1, 16);
  const size_t bytes = format.file.page_bytes();
  const auto end = static_cast<size_t>(lseek(fd, 0, SEEK_END));
  std::map<uint32_t, std::vector<off_t>> places;  // of pages with rows, by bucket
  std::vector<uint8_t> one(bytes), other(bytes);
  for (size_t at = 0; at + bytes <= end; at += bytes) {
    ASSERT_EQ(pread(fd, one.data(), bytes, static_cast<off_t>(at)), static_cast<ssize_t>(bytes));
    if (format.is_whole(one.data()) && format.rows_in(one.data()))
      places[format.bucket_of(one.data())].push_back(static_cast<off_t>(at));
  }
  for (const auto& [bucket, of] : places)
    for (size_t i = 0; i + 1 < of.size(); i += 2) {
      ASSERT_EQ(pread(fd, one.data(), bytes, of[i]) + pread(fd, other.data(), bytes, of[i + 1]),
                static_cast<ssize_t>(2 * bytes));
      ASSERT_EQ(pwrite(fd, other.data(), bytes, of[i]) + pwrite(fd, one.data(), bytes, of[i + 1]),
                static_cast<ssize_t>(2 * bytes));
    }
  close(fd);
  ASSERT_FALSE(places.empty());
  EXPECT_THROW(look_up(store, batch), ColdFault);
}

TEST(Cold, NamesAPageThatTheDiskChanged) {
  const Batch batch(numbered(1, 10'001));
  const auto made = mostly_on_disk(batch);
  Store& store = *made;
  damage(SIZE_MAX / 4096);
  try {
    look_up(store, batch);
    FAIL() << "the rows are not those that were written";
  } catch (const ColdFault& fault) {
    EXPECT_NE(std::string(fault.what()).find("is not as it was written"), std::string::npos);
  }
}

TEST(Cold, RefusesAFolderThatCannotHoldIt) {
  Store store(spec_of({counting_slot()}));
  EXPECT_THROW(store.keep_cold({"/proc", 1 << 20, 0}), ColdFault);
  Store rounded(spec_of({counting_slot()}));
  rounded.round_published(8, {0});
  EXPECT_THROW(rounded.keep_cold(tight()), std::invalid_argument);
}

}  // namespace
}  // namespace freshet
