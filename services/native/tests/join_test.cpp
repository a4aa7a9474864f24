#include "freshet/join.hpp"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>
#include <string>

namespace freshet::join {
namespace {

struct Named {
  Key key{};
};

Key key_of(uint64_t n) { return {n * 0x9E37'79B9'7F4A'7C15ull, n * 0xBF58'476D'1CE4'E5B9ull}; }

TEST(KeyMap, FindsWhatIsThereAndNothingElseWhateverWasErased) {
  Pool<Named> pool;
  KeyMap<Named> map(pool);
  std::map<uint64_t, uint32_t> expected;
  std::mt19937_64 random(1);
  for (int turn = 0; turn < 60'000; turn++) {
    const uint64_t n = random() % 5'000;
    if (const auto at = expected.find(n); at == expected.end()) {
      const uint32_t index = pool.take();
      pool[index].key = key_of(n);
      map.insert(pool[index].key, index);
      expected[n] = index;
    } else {
      ASSERT_EQ(map.find(key_of(n)), at->second);
      map.erase(key_of(n));
      pool.release(at->second);
      expected.erase(at);
    }
    ASSERT_EQ(map.size(), expected.size());
  }
  for (uint64_t n = 0; n < 5'000; n++) {
    const auto at = expected.find(n);
    ASSERT_EQ(map.find(key_of(n)), at == expected.end() ? kNone : at->second);
  }
}

TEST(TimeQueue, GivesEachItemOnceWhenItsTimeHasCome) {
  TimeQueue queue;
  std::multimap<int64_t, uint32_t> expected;
  std::mt19937_64 random(2);
  int64_t now = 0;
  for (uint32_t turn = 0; turn < 3'000; turn++) {
    for (uint64_t i = random() % 5; i-- > 0;) {
      const auto time = now - 500 + static_cast<int64_t>(random() % 9'000);
      queue.push(time, turn);
      expected.emplace(time, turn);
    }
    now += static_cast<int64_t>(random() % 300);
    const bool due = !expected.empty() && expected.begin()->first <= now;
    ASSERT_EQ(queue.due(now), due);
    std::multiset<uint32_t> got, wanted;
    queue.pop(now, [&](uint32_t item) { got.insert(item); });
    while (!expected.empty() && expected.begin()->first <= now) {
      wanted.insert(expected.begin()->second);
      expected.erase(expected.begin());
    }
    ASSERT_EQ(got, wanted);
    ASSERT_EQ(queue.size(), expected.size());
  }
}

TEST(TimeQueue, TakesTimesBeforeTheEpoch) {
  TimeQueue queue;
  queue.push(-5, 7);
  EXPECT_FALSE(queue.due(-6));
  EXPECT_TRUE(queue.due(-5));
}

TEST(Arena, KeepsBytesUntilFreedAndGivesChunksBack) {
  Arena arena;
  std::vector<std::pair<Arena::Place, std::string>> held;
  std::mt19937_64 random(3);
  for (int turn = 0; turn < 20'000; turn++) {
    std::string text(random() % 300 + (turn % 5'000 == 0 ? 400'000 : 0), static_cast<char>('a' + turn % 26));
    held.emplace_back(arena.put(reinterpret_cast<const uint8_t*>(text.data()), text.size()), text);
    if (held.size() > 100) {
      const size_t at = random() % 20;
      const auto [place, expected] = held[at];
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(arena.at(place)), expected.size()), expected);
      arena.free(place);
      held.erase(held.begin() + static_cast<ptrdiff_t>(at));
    }
  }
  for (const auto& [place, expected] : held) arena.free(place);
  EXPECT_LE(arena.bytes(), 700'000u);
}

TEST(Retained, NamesTheFirstRecordThatIsStillNeeded) {
  Retained retained;
  EXPECT_EQ(retained.low(0, 4), 4);
  retained.push(4, 100);
  retained.push(5, 300);
  retained.push(6, 200);
  EXPECT_EQ(retained.low(99, 7), 4);
  EXPECT_EQ(retained.low(200, 7), 5);
  EXPECT_EQ(retained.low(300, 7), 7);
}

TEST(SampleId, IsFrozen) {
  EXPECT_EQ(sample_id({1, 2}, 0), sample_id({1, 2}, 0));
  EXPECT_EQ(sample_id({0, 0}, 0), 5197578548964807871ll);
  EXPECT_EQ(sample_id({1, 2}, 3), -1757531460888966159ll);
  EXPECT_FALSE(kept(0, 0.0));
  EXPECT_TRUE(kept(0, 1.0));
}

Plan one_label() { return {{{1'000, -1, false}}, {}, 100, false, true, 1.0, 0}; }

TEST(Joiner, RefusesSpansOutsideTheDataBeforeItChangesAnything) {
  const std::vector<uint8_t> data(10);
  const std::vector<int64_t> zero{0}, ten{10}, eleven{11}, time{5};
  const std::vector<uint64_t> request{1};
  const std::vector<uint32_t> first{0};
  const std::vector<Key> key{{1, 1}};
  std::vector<Outcome> outcome(1);
  Joiner joiner(one_label());
  Impressions batch{data, zero, zero, zero, ten, eleven, request, first, first, key, time, zero, ten};
  EXPECT_THROW(joiner.on_served(batch, outcome), std::invalid_argument);
  EXPECT_EQ(joiner.ids(), 0u);
  batch.ends = ten;
  joiner.on_served(batch, outcome);
  EXPECT_EQ(joiner.ids(), 1u);
  joiner.advance(5 + 1'100);
  EXPECT_EQ(joiner.ready(false).samples, 1u);
  EXPECT_EQ(joiner.ready(false).bytes, 10u);
  joiner.discard();
  EXPECT_EQ(joiner.ready(false).samples, 0u);
}

TEST(Joiner, HoldsTheFirstPositivesAndReleasesThemWhenTheirTimeHasCome) {
  Plan plan = one_label();
  plan.warm_up_waits = 4;
  Joiner joiner(plan);
  EXPECT_EQ(joiner.began(), kNotBegun);
  const std::vector<uint8_t> data(10);
  const std::vector<int64_t> zero{0}, ten{10};
  const std::vector<uint64_t> request{1};
  const std::vector<uint32_t> first{0}, mask{1};
  std::vector<Outcome> outcome(1);
  // Waits are 1,100: of the first impression a positive is held so long, of one 2,200 later half as long.
  const std::vector<std::array<int64_t, 2>> held{{5, 1'105}, {2'205, 2'755}};
  for (const auto& [time, until] : held) {
    const std::vector<int64_t> served{time}, acted{time + 1};
    const std::vector<Key> key{key_of(static_cast<uint64_t>(time))}, id{key_of(static_cast<uint64_t>(time) + 1)};
    joiner.on_served({data, zero, zero, zero, ten, ten, request, first, first, key, served, zero, ten}, outcome);
    joiner.on_actions({zero, acted, key, id, mask, {}}, outcome);
    EXPECT_EQ(joiner.began(), 5);
    EXPECT_FALSE(joiner.due(until - 1));
    EXPECT_TRUE(joiner.due(until));
    joiner.advance(until - 1);
    EXPECT_EQ(joiner.ready(false).samples, 0u);
    joiner.advance(until);
    EXPECT_EQ(joiner.ready(false).samples, 1u);
    joiner.discard();
  }
}

// Impressions n = 0 to 29, of times 500 n, at offset n each; of every second one there is an action at once.
struct SetBack {
  static constexpr int64_t kStep = 500;
  Joiner joiner{one_label()};  // window 1,000, grace 100: ids of actions are known for 1,200, of impressions for 2,200
  std::vector<Outcome> outcome{Outcome::kNew};

  Outcome serve(uint64_t n) {
    const std::vector<uint8_t> data(10);
    const std::vector<int64_t> zero{0}, ten{10}, offset{static_cast<int64_t>(n)}, time{static_cast<int64_t>(n) * kStep};
    const std::vector<uint64_t> request{n};
    const std::vector<uint32_t> first{0};
    const std::vector<Key> key{key_of(n)};
    joiner.on_served({data, offset, zero, zero, ten, ten, request, first, first, key, time, zero, ten}, outcome);
    return outcome[0];
  }
  Outcome act(uint64_t n) {
    const std::vector<int64_t> offset{static_cast<int64_t>(n)}, time{static_cast<int64_t>(n) * kStep};
    const std::vector<uint32_t> mask{1};
    const std::vector<Key> key{key_of(n)}, id{key_of(n + 1'000)};
    joiner.on_actions({offset, time, key, id, mask, {}}, outcome);
    return outcome[0];
  }
  void read(uint64_t from, uint64_t to) {
    for (uint64_t n = from; n < to; n++) {
      serve(n);
      if (n % 2 == 0) act(n);
    }
  }
  size_t emitted() {
    const size_t samples = joiner.ready(false).samples;
    joiner.discard();
    return samples;
  }
  std::vector<int64_t> state() {
    std::vector<int64_t> found(1);
    joiner.pending(found);
    found.insert(found.end(), {joiner.watermark(), joiner.low(0, 30), joiner.low(2, 30),
                               static_cast<int64_t>(joiner.ids()), static_cast<int64_t>(joiner.waiting())});
    return found;
  }
};

TEST(Joiner, KnowsWhatItHasDecidedAfterTheWatermarkIsSetBack) {
  SetBack one;
  one.read(0, 20);
  one.joiner.advance(14'500);  // all impressions are decided, all ids forgotten
  EXPECT_EQ(one.emitted(), 20u);
  EXPECT_EQ(one.state(), (std::vector<int64_t>{0, 14'500, 30, 30, 0, 0}));
  one.serve(29);  // pending
  one.act(28);    // waits
  EXPECT_THROW(one.joiner.set_back(14'501), std::invalid_argument);

  one.joiner.set_back(8'000);
  one.read(10, 20);  // later than the horizon before the new watermark: from 6,800 on
  EXPECT_EQ(one.joiner.ids(), 6u + 3u + 3u);
  one.read(10, 20);  // twice
  one.joiner.end_recall();
  EXPECT_EQ(one.state(), (std::vector<int64_t>{1, 8'000, 14, 14, 6 + 3 + 3, 1}));
  EXPECT_EQ(one.emitted(), 0u);

  for (uint64_t n = 0; n < 20; n++) {
    EXPECT_EQ(one.serve(n), n < 14 ? Outcome::kTooLate : Outcome::kDuplicate) << n;
    if (n % 2 == 0) EXPECT_EQ(one.act(n), n < 14 ? Outcome::kTooLate : Outcome::kDuplicate) << n;
  }
  EXPECT_EQ(one.emitted(), 0u);
  EXPECT_EQ(one.serve(22), Outcome::kNew);  // a new one is joined
  EXPECT_EQ(one.act(22), Outcome::kNew);
  EXPECT_EQ(one.emitted(), 1u);
  one.joiner.advance(100'000);
  EXPECT_EQ(one.emitted(), 1u);
  EXPECT_EQ(one.state(), (std::vector<int64_t>{0, 100'000, 30, 30, 0, 0}));
}

TEST(Joiner, AnActionRecalledWaitsForAnImpressionThatIsStillToCome) {
  SetBack one;
  one.act(16);
  one.joiner.advance(14'500);
  EXPECT_EQ(one.joiner.waiting(), 0u);
  one.joiner.set_back(8'000);
  one.act(16);
  one.joiner.end_recall();
  EXPECT_EQ(one.joiner.waiting(), 1u);
  EXPECT_EQ(one.serve(16), Outcome::kNew);
  EXPECT_EQ(one.emitted(), 1u);
}

TEST(Joiner, RefusesTimesThatSumsCouldOverflow) {
  Joiner joiner(one_label());
  const std::vector<int64_t> offset{0}, bad{std::numeric_limits<int64_t>::max()};
  const std::vector<Key> key{{1, 1}};
  std::vector<Outcome> outcome(1);
  EXPECT_THROW(joiner.on_shown({offset, bad, key}, outcome), std::invalid_argument);
}

}  // namespace
}  // namespace freshet::join
