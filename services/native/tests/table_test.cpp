#include "freshet/table.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "table_support.hpp"

namespace freshet {
namespace {

using testing::counting_slot;
using testing::key_of;
using testing::mixed_slots;

TEST(Arena, GivesBackPagesAndUsesThemAgain) {
  Arena arena(6144);
  const uint64_t first = arena.take(3);
  std::memset(arena.base() + first * 6144, 7, 3 * 6144);
  EXPECT_EQ(arena.bytes_in_use(), 3u * 6144);

  arena.release(first, 3);

  EXPECT_EQ(arena.bytes_in_use(), 0u);
  EXPECT_EQ(arena.take(2), first);
  EXPECT_EQ(arena.take(1), first + 2);
  EXPECT_EQ(arena.take(1000), first + 3);
}

TEST(Arena, PagesThatNeighboursShareGoWithTheLastOfThem) {
  constexpr size_t piece = 5376, n = 150;  // too few for pages to be touched ahead
  Arena arena(piece);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pages = (n * piece + page - 1) / page;
  const auto resident = [&] {
    std::vector<unsigned char> in_core(pages);
    EXPECT_EQ(mincore(arena.base(), pages * page, in_core.data()), 0);
    return std::count_if(in_core.begin(), in_core.end(), [](unsigned char c) { return c & 1; });
  };
  for (uint64_t i = 0; i < n; i++) std::memset(arena.base() + arena.take(1) * piece, 7, piece);
  ASSERT_EQ(resident(), static_cast<int64_t>(pages));

  for (uint64_t i = 0; i < n; i += 2) arena.release(i, 1);
  for (uint64_t i = 1; i < n; i += 2)
    for (size_t at = 0; at < piece; at++) ASSERT_EQ(arena.base()[i * piece + at], 7);
  for (uint64_t i = 1; i < n; i += 2) arena.release(i, 1);

  EXPECT_EQ(resident(), 0);
}

bool in_core(const uint8_t* page) {
  unsigned char core = 0;
  EXPECT_EQ(mincore(const_cast<uint8_t*>(page), 1, &core), 0);
  return core & 1;
}

TEST(Arena, PagesAreTouchedAheadOfTheirUse) {
  constexpr size_t mib = 1 << 20;
  Arena arena(mib);
  arena.take(3);
  const uint8_t* ahead = arena.base() + 5 * mib;  // behind the huge page that the next piece is of
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  const auto touched = [&] { return arena.holds(ahead) && in_core(ahead); };
  while (!touched() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(touched());
}

TEST(Arena, TouchingAheadLeavesWhatIsWritten) {
  constexpr size_t piece = 4096, n = 8192;
  Arena arena(piece);
  for (uint64_t i = 0; i < n; i++) std::memset(arena.base() + arena.take(1) * piece, static_cast<uint8_t>(i), piece);
  for (uint64_t i = 0; i < n; i++) ASSERT_EQ(arena.base()[i * piece], static_cast<uint8_t>(i));
}

TEST(Arena, PiecesInUseNeverOverlap) {
  Arena arena(64);
  std::mt19937 random(3);
  std::map<uint64_t, uint64_t> used;
  for (int turn = 0; turn < 20000; turn++) {
    if (used.empty() || random() % 3) {
      const uint64_t n = 1 + random() % 40;
      const uint64_t first = arena.take(n);
      const auto next = used.lower_bound(first);
      ASSERT_TRUE(next == used.end() || first + n <= next->first);
      ASSERT_TRUE(next == used.begin() || std::prev(next)->first + std::prev(next)->second <= first);
      used[first] = n;
      std::memset(arena.base() + first * 64, 1, n * 64);
    } else {
      const auto gone = std::next(used.begin(), random() % used.size());
      arena.release(gone->first, gone->second);
      used.erase(gone);
    }
  }
}

// 37 stores of two groups, alive at once, once took all addresses of a process.
TEST(Arena, ManyAreAliveAtOnce) {
  std::vector<std::unique_ptr<Arena>> arenas;
#ifdef __SANITIZE_THREAD__
  constexpr int many = 4;  // whose own addresses are few
#else
  constexpr int many = 2000;
#endif
  for (int i = 0; i < many; i++) arenas.push_back(std::make_unique<Arena>(64));
  const auto last = arenas.back()->take(100);
  std::memset(arenas.back()->base() + last * 64, 1, 6400);
}

TEST(Arena, SaysWhatCouldNotBeHad) {
  Arena arena(size_t{1} << 30);
  try {
    arena.take(uint64_t{1} << 20);  // 2^50 bytes
    FAIL() << "took more than there is";
  } catch (const std::bad_alloc& error) {
    EXPECT_NE(std::string(error.what()).find("spread the rows over more shards"), std::string::npos) << error.what();
  }
}

TEST(Group, HoldsWhatADictionaryHolds) {
  Group group({counting_slot()}, false, false, {0, 1}, 2);
  Bin& bin = group.bin(0);
  std::map<std::pair<uint64_t, uint8_t>, uint32_t> rows;  // -> touched, as a value of the row
  std::mt19937_64 random(5);
  for (uint32_t turn = 1; turn < 60000; turn++) {
    const uint64_t key = key_of(1 + random() % 3000);
    const uint8_t table = random() & 1;
    const uint32_t slot = group.find(bin, key, table);
    ASSERT_EQ(slot != Group::kNone, rows.count({key, table}) > 0);
    if (slot == Group::kNone) {
      const uint32_t fresh = group.insert(bin, 0, key, table);
      group.header(fresh).touched = turn;
      rows[{key, table}] = turn;
    } else {
      ASSERT_EQ(group.header(slot).touched, (rows[{key, table}]));
      // Runs of removals, so that blocks and chunks are emptied too.
      if ((turn / 5000) % 2) {
        group.erase(bin, slot);
        rows.erase({key, table});
      }
    }
    if (turn % 5000 == 0) group.shrink(bin, 0);
    ASSERT_EQ(bin.rows, rows.size());
  }
  for (const auto& [row, touched] : rows) {
    const uint32_t slot = group.find(bin, row.first, row.second);
    ASSERT_NE(slot, Group::kNone);
    EXPECT_EQ(group.header(slot).touched, touched);
  }
  group.clear(bin);
  EXPECT_EQ(group.bytes(), 0u);
}

TEST(Group, KeysThatShareTagAndHomeAreStillExact) {
  Group group({counting_slot()}, false, false, {0}, 2);
  Bin& bin = group.bin(0);
  for (uint64_t n = 1; n < 4000; n++) group.insert(bin, 0, n << 32, 0);
  for (uint64_t n = 1; n < 4000; n++) {
    EXPECT_NE(group.find(bin, n << 32, 0), Group::kNone);
    EXPECT_EQ(group.find(bin, (n << 32) | 1, 0), Group::kNone);
    EXPECT_EQ(group.find(bin, n << 32, 1), Group::kNone);
  }
}

TEST(Group, BucketsDoNotAllGrowAtOnce) {
  constexpr uint32_t buckets = 256;
  Group group({counting_slot()}, false, false, {0}, buckets);
  uint32_t worst = 0;
  for (uint64_t row = 1; row < 2000; row++) {
    uint32_t grown = 0;
    for (uint32_t b = 0; b < buckets; b++) {
      const uint32_t before = group.bin(b).chunk_count;
      group.insert(group.bin(b), b, key_of(row * buckets + b), 0);
      grown += before != group.bin(b).chunk_count;
    }
    if (row > 300) worst = std::max(worst, grown);  // small indexes grow at few sizes, and fast
  }
  EXPECT_LT(worst, buckets / 8);
}

TEST(RowLayout, AVectorStartsACacheLineWhereThatIsCheap) {
  const std::map<std::string, double> adagrad{{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}};
  const RowLayout hedge(
      {{0, 1, 0.0f, "adagrad", adagrad}, {1, 1, 0.0f, "adagrad", adagrad}, {2, 16, 0.01f, "rowwise_adagrad", adagrad}},
      false, false);
  EXPECT_EQ(hedge.record_bytes(), 128u);
  EXPECT_EQ(hedge.packed_bytes(), 8u + 4 * (18 + 3));
  const RowLayout small({counting_slot(4)}, false, false);
  EXPECT_EQ(small.record_bytes(), 32u);
}

TEST(RowLayout, RowsAreCloseWhereWholeLinesWouldWasteMuch) {
  const std::map<std::string, double> adagrad{{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}};
  const std::vector<SlotSpec> plain{{0, 16, 0.01f, "rowwise_adagrad", adagrad}};
  EXPECT_EQ(RowLayout(plain, false, false).record_bytes(), 84u);
  EXPECT_EQ(RowLayout(plain, true, false).record_bytes(), 64u);
}

// One row of a layout, in memory of its own.
struct OneRow {
  explicit OneRow(const RowLayout& layout) : record(layout.record_bytes()), row(layout.row(record.data())) {}
  std::vector<uint8_t> record;
  Row row;
};

bool step(const RowLayout& layout, Row row, const std::vector<float>& gradient) {
  uint8_t stepped;
  const Place place = layout.place(row);
  layout.step(&place, gradient.data(), 1, &stepped);
  return stepped;
}

// Layouts with a step of their own must do as the general one does, which a slot in front that learns nothing forces.
TEST(RowLayout, AStepThatIsSpecialisedStepsLikeTheGeneralOne) {
  const std::map<std::string, double> adagrad{{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}};
  for (const bool half : {false, true})
    for (const bool scalar : {false, true}) {
      std::vector<SlotSpec> slots;
      if (scalar) slots.push_back({0, 1, 0.0f, "adagrad", adagrad});
      slots.push_back({scalar, 16, 0.01f, "rowwise_adagrad", adagrad});
      const RowLayout layout(slots, half, false);
      slots.back().rule = "rowwise_rmsprop";  // decay 0 and Adagrad's first step are one rule
      slots.back().parameters["decay"] = 0.0;
      const RowLayout general(slots, half, false);
      OneRow a(layout), b(general);
      for (OneRow* one : {&a, &b}) one->row.header() = {key_of(3), 0, 0};
      layout.create(a.row, key_of(3), 0, 5);
      general.create(b.row, key_of(3), 0, 5);
      std::vector<float> gradient(layout.width());
      for (size_t i = 0; i < gradient.size(); i++) gradient[i] = 0.1f * static_cast<float>(i) - 0.7f;
      ASSERT_TRUE(step(layout, a.row, gradient));
      ASSERT_TRUE(step(general, b.row, gradient));
      std::vector<uint8_t> x(layout.packed_bytes()), y(general.packed_bytes());
      layout.pack(a.row, x.data());
      general.pack(b.row, y.data());
      EXPECT_EQ(x, y) << half << scalar;
    }
}

TEST(RowLayout, PackedRowsOfEveryRuleComeBackAsTheyWere) {
  for (const bool half : {false, true}) {
    const RowLayout layout(mixed_slots(), half, false);
    OneRow record(layout), copy(layout);
    std::vector<uint8_t> packed(layout.packed_bytes());
    record.row.header() = {key_of(1), 1u | meta::kDirtyFlush, 77};
    layout.create(record.row, key_of(1), 1, 5);
    std::vector<float> gradient(layout.width(), 0.25f);
    for (int i = 0; i < 5; i++) ASSERT_TRUE(step(layout, record.row, gradient));

    layout.pack(record.row, packed.data());
    ASSERT_EQ(layout.packed_fault(packed.data(), 1), nullptr);
    EXPECT_NE(layout.packed_fault(packed.data(), 0), nullptr);
    layout.unpack(copy.row, packed.data());

    std::vector<float> a(layout.width()), b(layout.width());
    layout.load(record.row, a.data());
    layout.load(copy.row, b.data());
    EXPECT_EQ(a, b);
    std::vector<uint8_t> again(layout.packed_bytes());
    layout.pack(copy.row, again.data());
    EXPECT_EQ(packed, again);
  }
}

TEST(RowLayout, AGradientThatIsNotFiniteChangesNothing) {
  const RowLayout layout(mixed_slots(), false, false);
  OneRow record(layout);
  layout.create(record.row, 1, 0, 5);
  const std::vector<uint8_t> before = record.record;
  for (uint32_t at = 0; at < layout.width(); at++) {
    std::vector<float> gradient(layout.width(), 1.0f);
    gradient[at] = at % 2 ? std::nanf("") : INFINITY;
    EXPECT_FALSE(step(layout, record.row, gradient));
    EXPECT_EQ(record.record, before);
  }
}

TEST(RowLayout, UnknownAndMissingParametersAreNamed) {
  EXPECT_THROW(RowLayout({{0, 1, 0.0f, "adagrad", {{"lr", 1.0}}}}, false, false), std::invalid_argument);
  EXPECT_THROW(RowLayout({{0, 1, 0.0f, "sgd", {{"lr", 1.0}, {"eps", 1.0}}}}, false, false), std::invalid_argument);
  EXPECT_THROW(RowLayout({{0, 1, 0.0f, "momentum", {}}}, false, false), std::invalid_argument);
  EXPECT_THROW(RowLayout({{1, 1, 0.0f, "sgd", {{"lr", 1.0}}}}, false, false), std::invalid_argument);
  EXPECT_THROW(RowLayout({}, false, false), std::invalid_argument);
}

TEST(Simd, SquaredSumFollowsItsTree) {
  for (uint32_t n = 0; n < 70; n++) {
    std::vector<float> x(n);
    for (uint32_t i = 0; i < n; i++) x[i] = 0.1f * static_cast<float>(i) - 1.3f;
    float lane[16] = {};
    for (uint32_t i = 0; i < n; i++) lane[i % 16] += x[i] * x[i];
    for (uint32_t half = 8; half; half /= 2)
      for (uint32_t j = 0; j < half; j++) lane[j] += lane[j + half];
    EXPECT_EQ(squared_sum(x.data(), n), lane[0]) << n;
  }
}

}  // namespace
}  // namespace freshet
